"""Local processes as nodes: what workers get, and how much memory they hold; without a node."""

import fcntl
import os
import socket

import pytest
from support.ends import KEY
from support.plans import HERE, plan, spec

from orchestrate.engines import venv
from orchestrate.engines.process import ProcessEngine
from orchestrate.files import records
from orchestrate.files.paths import JobPaths


@pytest.mark.parametrize("pip", [[], ["a"]])
def test_a_worker_must_get_the_environment_of_the_caller_without_secrets_that_are_files(tmp_path, monkeypatch, pip):
    paths = JobPaths(tmp_path / "j")
    paths.create()
    records.make(paths.root, KEY)
    for name in ("HF_TOKEN", "WANDB_KEY", "RANK"):
        monkeypatch.setenv(name, "of the caller")
    requested = spec(trainers=0, pip=pip, secrets={"HF_TOKEN": "env"}, env={"PYTHONUNBUFFERED": "0"})
    python = str(venv.python(pip))
    planned = plan(requested, HERE.but(engine="process", code=str(tmp_path), python=python), "j")
    session = ProcessEngine().open(requested, planned, paths.shared, lambda warning: None)
    request = session.request(planned.workers[0], ("x.py",))
    session.clients.selector.close()
    assert (request.command, request.inherit, request.cwd) == (["x.py"], False, planned.placement.cwd or str(tmp_path))
    assert (request.env["WANDB_KEY"], request.env["RANK"]) == ("of the caller", "0")
    assert request.env["PYTHONUNBUFFERED"] == "0" and "HF_TOKEN" not in request.env
    assert request.env["PATH"] == (f"{os.path.dirname(python)}:" if pip else "") + os.environ["PATH"]


def test_the_memory_of_a_job_must_be_that_of_its_listening_nodes_in_bytes(tmp_path):
    engine = ProcessEngine()
    engine.state = tmp_path
    (tmp_path / "j").mkdir()
    with (tmp_path / "j" / "n.lock").open("w") as lock, socket.socket(socket.AF_UNIX) as server:
        fcntl.flock(lock, fcntl.LOCK_EX)
        server.bind(str(tmp_path / "j" / "n.sock"))
        server.listen()
        assert 4 << 20 < engine.memory("j") < 64 << 30 and engine.memory("k") == 0
