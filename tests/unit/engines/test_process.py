"""Local processes as nodes: what workers get, and how much memory they hold; without a node."""

import contextlib
import fcntl
import os
import socket
import sys

import pytest
from support.ends import KEY
from support.plans import HERE, plan, spec

from orchestrate.engines import venv
from orchestrate.engines.process import ProcessEngine
from orchestrate.host import records
from orchestrate.node.warm import fields
from orchestrate.record.paths import JobPaths


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
    assert (request.command, request.inherit, request.cwd) == (["x.py"], False, planned.placement.cwd(str(tmp_path)))
    assert (request.env["WANDB_KEY"], request.env["RANK"]) == ("of the caller", "0")
    assert request.env["PYTHONUNBUFFERED"] == "0" and "HF_TOKEN" not in request.env


@pytest.mark.parametrize(
    ("path", "first"),
    [
        ("{other}:/usr/bin", True),
        ("/nowhere", True),
        ("{folder}:{other}", False),
        ("{empty}:{folder}:{other}", False),
        ("{other}:{folder}", True),
    ],
)
def test_python_in_a_shell_script_must_be_the_one_that_runs_scripts(tmp_path, monkeypatch, path, first):
    paths = JobPaths(tmp_path / "j")
    paths.create()
    records.make(paths.root, KEY)
    places = {name: str(tmp_path / name) for name in ("folder", "other", "empty")}
    for name, place in places.items():
        os.mkdir(place)
        if name != "empty":
            os.symlink(sys.executable, f"{place}/python")
    given = path.format(**places)
    monkeypatch.setenv("PATH", given)
    for python, added in (("python", first), ("python3", first)):
        site = HERE.but(engine="process", code=str(tmp_path), python=f"{places['folder']}/{python}")
        planned = plan(spec(trainers=0), site, "j")
        session = ProcessEngine().open(spec(trainers=0), planned, paths.shared, lambda warning: None)
        request = session.request(planned.workers[0], ("x.sh",))
        session.clients.selector.close()
        assert request.env["PATH"] == (f"{places['folder']}:{given}" if added else given)


def test_a_search_path_must_stay_as_it_is_if_the_interpreter_has_another_name(tmp_path, monkeypatch):
    paths = JobPaths(tmp_path / "j")
    paths.create()
    records.make(paths.root, KEY)
    planned = plan(spec(trainers=0), HERE.but(engine="process", python=str(tmp_path / "python3")), "j")
    session = ProcessEngine().open(spec(trainers=0), planned, paths.shared, lambda warning: None)
    assert session.request(planned.workers[0], ("x.sh",)).env["PATH"] == os.environ["PATH"]
    session.clients.selector.close()


def test_the_memory_of_a_job_must_be_that_of_its_listening_nodes_in_bytes(tmp_path):
    engine = ProcessEngine()
    engine.state = tmp_path
    (tmp_path / "j").mkdir()
    with (tmp_path / "j" / "n.lock").open("w") as lock, socket.socket(socket.AF_UNIX) as server:
        fcntl.flock(lock, fcntl.LOCK_EX)
        server.bind(str(tmp_path / "j" / "n.sock"))
        server.listen()
        assert 4 << 20 < engine.memory("j") < 64 << 30 and engine.memory("k") == 0


@pytest.mark.parametrize("held", [True, False, "old"])
def test_a_node_that_accepts_nothing_must_be_listed_without_waiting_for_it(tmp_path, held):
    engine = ProcessEngine()
    engine.state = tmp_path
    (tmp_path / "j").mkdir()
    path = str(tmp_path / "j" / "n.sock")
    with contextlib.ExitStack() as opened:
        lock = opened.enter_context((tmp_path / "j" / "n.lock").open("w"))
        if held:
            fcntl.flock(lock, fcntl.LOCK_EX)
            lock.write(f"{os.getpid()} {int(fields(os.getpid())[19]) - (held == 'old')}")  # or another process's
            lock.flush()
        server = opened.enter_context(socket.socket(socket.AF_UNIX))
        server.bind(path)
        server.listen(0)
        opened.enter_context(socket.socket(socket.AF_UNIX)).connect(path)  # now its queue is full
        assert [state.nodes for state in engine.jobs()] == [1] * (held is True)
        assert engine.resources("j")[:-1] == [f"process {os.getpid()} (n)"] * (held is True)
