"""Workers of a plain Compose project must get what the master assigns, and keep what a user has set."""

from types import SimpleNamespace
from typing import Any

from orchestrate.node import rendezvous


def test_only_variables_that_a_user_may_set_must_take_precedence_over_the_masters(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("WORLD_SIZE", "9")
    envs: list[dict[str, str]] = []
    loop: Any = SimpleNamespace(start=lambda command, env, cwd, done: envs.append(env))
    assigned = {"RANK": "1", "WORLD_SIZE": "2", "OMP_NUM_THREADS": "4"}
    rendezvous.start(loop, ["x.py"], [assigned], lambda rank, code: None)
    assert [[env[name] for name in assigned] for env in envs] == [["1", "2", "7"]]
