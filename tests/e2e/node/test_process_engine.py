"""Nodes as local processes: real ones, with their sockets in a folder of the test."""

import contextlib
import dataclasses
import fcntl
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.ends import KEY
from support.optional import not_none
from support.plans import HERE, plan
from support.processes import MARK, environ, gone, processes
from support.scripted import Clock
from support.waiting import eventually

from orchestrate.clock import SYSTEM
from orchestrate.clock import Clock as AnyClock
from orchestrate.engines import process
from orchestrate.engines.base import JobState
from orchestrate.engines.process import ProcessEngine, ProcessSession
from orchestrate.errors import EngineError
from orchestrate.host import records
from orchestrate.plan.plan import Plan
from orchestrate.spec.spec import JobSpec

SPEC = JobSpec(trainers=1, grace=7.0, command=("work.py",))


class FastClock(Clock):
    """A clock on which waiting takes almost no real time."""

    def sleep(self, seconds: float) -> None:
        time.sleep(0.001)
        super().sleep(seconds)


class Nodes:
    """Engines of several orchestrators that share a folder of sockets, and the run directory of a job."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.state, self.run = folder, folder / "s", folder / "run"
        self.clock: AnyClock = SYSTEM
        (self.run / "logs").mkdir(parents=True)
        records.make(folder, KEY)
        self.sessions: list[ProcessSession] = []

    def shell(self) -> ProcessEngine:
        """A new engine, as in another shell."""
        engine = ProcessEngine(self.clock)
        engine.state = self.state
        return engine

    def session(self, job: str = "j", **site: Any) -> ProcessSession:
        self.sessions.append(self.shell().open(SPEC, self.plan(job=job, **site), self.run, lambda warning: None))
        return self.sessions[-1]

    def plan(self, spec: JobSpec = SPEC, job: str = "j", **site: Any) -> Plan:
        here = HERE.but(engine="process", python=sys.executable, master_addr="127.0.0.1", interface="lo", network="")
        changes = {"code": str(self.folder), "job_dir": str(self.run), **site}
        return plan(spec, here.but(**changes), job)

    def up(self, job: str = "j", **site: Any) -> ProcessSession:
        """A session whose nodes are up."""
        session = self.session(job, **site)
        session.up(self.plan(job=job, **site))
        return session

    def start(self, session: ProcessSession, script: str) -> None:
        """Start workers that run `script`."""
        (self.folder / "work.py").write_text(script)
        session.start(dataclasses.replace(self.plan(), command=("work.py",)))

    def clear(self) -> None:
        """Kill all processes and close all connections."""
        left = processes(self.folder)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for session in self.sessions:
            session.clients.selector.close()
            for connection in session.clients.connections.values():
                connection.close()
            for child in [node.child for node in session.nodes.values() if node.child]:
                child.kill()  # `processes` misses it until it has executed its program
                child.wait()


@pytest.fixture
def nodes(tmp_path, monkeypatch) -> Iterator[Nodes]:
    monkeypatch.setenv(MARK, str(tmp_path))
    nodes = Nodes(tmp_path)
    yield nodes
    nodes.clear()


def pids(engine: ProcessSession) -> dict[str, int]:
    return {name: node.pid for name, node in engine.nodes.items()}


# --- up and down


def test_a_node_must_be_started_once_with_the_settings_of_the_job(nodes):
    engine = nodes.up(preload=("colorsys", "wave"))
    assert {*engine.alive()} == {"master", "trainer-1"} == set(pids(engine))
    for name, pid in pids(engine).items():
        env = environ(pid)
        assert (env["NODE_MODE"], env["NODE_GRACE"], env["NODE_PRELOAD"]) == ("agent", "7.0", "colorsys wave")
        assert env["NODE_SOCKET"] == str(nodes.state / "j" / f"{name}.sock")
        assert os.getsid(pid) == pid  # Ctrl-C does not reach it
        assert os.readlink(f"/proc/{pid}/cwd") == str(nodes.folder)
        assert {os.readlink(f"/proc/{pid}/fd/{number}") for number in range(3)} == {"/dev/null"}
    assert stat.S_IMODE((nodes.state / "j").stat().st_mode) == 0o700
    before = pids(engine)
    engine.up(nodes.plan())
    assert pids(engine) == before


def test_only_a_lost_node_must_be_replaced(nodes):
    engine = nodes.up()
    before = pids(engine)
    os.kill(before["trainer-1"], signal.SIGKILL)
    eventually(lambda: {*engine.alive()} == {"master"})
    engine.up(nodes.plan())
    after = pids(engine)
    assert {*engine.alive()} == {"master", "trainer-1"}
    assert after["master"] == before["master"] and after["trainer-1"] != before["trainer-1"]


def test_nodes_of_another_orchestrator_must_be_found_used_and_stopped(nodes):
    before, first = pids(nodes.up()), nodes.sessions[0]
    second, third = nodes.up(), nodes.up()
    assert pids(second) == before and {*second.alive()} == {"master", "trainer-1"}
    second.discard(["trainer-1"])
    assert {*second.alive()} == {"master"}
    eventually(lambda: {*first.alive()} == {"master"})
    second.up(nodes.plan())
    assert pids(second)["trainer-1"] != before["trainer-1"]
    assert {*third.alive()} == {"master"}  # another process is listening now
    third.adopt(nodes.plan())
    assert {*third.alive()} == {"master", "trainer-1"}
    second.down(30.0)
    assert {*second.alive()} == set()
    eventually(lambda: not first.alive())
    assert not (nodes.state / "j").exists()


def test_the_end_of_a_job_must_stop_only_its_own_nodes(nodes):
    other, engine = nodes.up("other"), nodes.up()
    before = pids(engine)
    engine.down(30.0)
    assert all(map(gone, before.values()))
    assert [path.name for path in nodes.state.iterdir()] == ["other"]
    assert {*other.alive()} == {"master", "trainer-1"}
    nodes.session("none").down(30.0)  # a job whose nodes never started
    assert nodes.state.exists()


def test_the_nodes_of_a_cluster_must_outlive_its_jobs(nodes):
    engine = nodes.up(cluster="c")
    assert [path.name for path in nodes.state.iterdir()] == ["c"]
    engine.adopt(nodes.plan(cluster="c"))
    engine.down(30.0)
    assert {*engine.alive()} == {"master", "trainer-1"} and engine.clients.cleaned == {"master", "trainer-1"}


def test_up_must_fail_immediately_if_a_node_dies_or_the_job_is_stopped(nodes, monkeypatch):
    monkeypatch.setattr(process, "NODE", nodes.folder / "node.py")
    (nodes.folder / "node.py").write_text(
        "import os, signal\nif 'master' in os.environ['NODE_SOCKET']: signal.pause()\n"
    )
    checks = iter(range(3000))  # half a minute
    with pytest.raises(EngineError, match="a node did not start"):
        nodes.session().up(nodes.plan(), lambda: next(checks) < 0)
    (nodes.folder / "node.py").write_text("import signal\nsignal.pause()\n")
    checks = iter(range(3000))
    with pytest.raises(EngineError, match="a node did not start"):
        nodes.session("k").up(nodes.plan(job="k"), lambda: next(checks) > 3)


def test_up_must_time_out_if_a_node_does_not_listen(nodes, monkeypatch):
    monkeypatch.setattr(process, "NODE", nodes.folder / "node.py")
    (nodes.folder / "node.py").write_text("import signal\nsignal.pause()\n")
    nodes.clock = clock = Clock()
    began = clock.now
    with pytest.raises(EngineError, match="a node did not start"):
        nodes.up()
    assert 50 < clock.now - began < 70


def test_a_folder_that_cannot_be_created_must_be_an_engine_error(nodes):
    nodes.state.mkdir()
    (nodes.state / "j").touch()
    with pytest.raises(EngineError, match="cannot start a node.*j"):
        nodes.up()


# --- workers


def test_the_environment_of_the_job_must_override_the_environment_of_the_caller(nodes, monkeypatch):
    monkeypatch.setenv("MINE", "caller")
    monkeypatch.setenv("RANK", "caller")
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    engine = nodes.up()
    nodes.start(
        engine, "import json, os\njson.dump([dict(os.environ), os.getcwd()], open(f\"{os.environ['RANK']}\", 'w'))\n"
    )
    ends = []
    eventually(lambda: len(ends.extend(engine.wait(1).exits) or ends) == 2)
    assert sorted((end.rank, end.code) for end in ends) == [(0, 0), (1, 0)]
    for rank in (0, 1):
        env, folder = json.loads((nodes.folder / str(rank)).read_text())
        assert (env["RANK"], env["MINE"], env["PYTHONUNBUFFERED"]) == (str(rank), "caller", "1")
        assert "NODE_SOCKET" not in env and folder == str(nodes.folder)
    again = nodes.session()  # asks the nodes for their exit codes
    assert again.adopt(nodes.plan()) == set()
    assert sorted((end.rank, end.code) for end in again.wait(0).exits) == [(0, 0), (1, 0)]
    assert again.adopt(nodes.plan()) == set()
    fresh = nodes.session("none")
    assert fresh.adopt(nodes.plan(job="none")) == set()
    assert [end.code for end in fresh.wait(0).exits] == [137, 137]  # the nodes do not exist


def test_a_lost_node_must_be_distinguished_from_a_lack_of_memory(nodes):
    engine = nodes.up()
    nodes.start(engine, "import os, signal\nif os.environ['RANK'] == '1': os.kill(os.getpid(), 9)\nsignal.pause()\n")
    (end,) = eventually(lambda: engine.wait(1).exits)
    assert (end.rank, end.code, engine.explain(end, "trainer-1")) == (1, 137, None)
    engine.clients.exit_hints[1] = "oom"
    assert engine.explain(end, "trainer-1") == "out of memory"
    assert engine.explain(dataclasses.replace(end, code=1), "trainer-1") is None
    os.kill(pids(engine)["trainer-1"], signal.SIGKILL)
    eventually(lambda: "trainer-1" not in engine.alive())
    assert engine.explain(end, "trainer-1") == "node lost"
    assert engine.wait(0).troubles == {}


def test_only_workers_of_a_dead_node_must_be_killed_with_their_child_processes(nodes):
    engine = nodes.session()
    workers = [subprocess.Popen(["sh", "-c", "sleep 600 & wait"], start_new_session=True) for _ in range(2)]
    try:
        engine.clients.running = {0: "master", 1: "trainer-1", 2: "trainer-1", 3: "trainer-1"}
        ended = subprocess.Popen(["true"])
        ended.wait()
        # rank 3 has no process yet
        engine.clients.pids = {rank: worker.pid for rank, worker in enumerate(workers)} | {2: ended.pid}
        engine.clients._resolve({"trainer-1"})
        assert [(end.rank, end.code) for end in engine.wait(0).exits] == [(1, 137), (2, 137), (3, 137)]
        assert workers[1].wait() == -signal.SIGKILL
        assert workers[0].poll() is None
    finally:
        for worker in workers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()


@pytest.mark.parametrize("how", ["down", "remove"])
def test_workers_must_get_the_grace_period_to_end(nodes, how):
    nodes.clock = FastClock()
    engine = nodes.up()
    nodes.start(
        engine,
        "import signal, sys, time\nsignal.signal(15, lambda *_: (time.sleep(0.3), open('saved', 'w'), sys.exit()))\n"
        "open('listens', 'w')\nwhile True: signal.pause()\n",
    )
    eventually(lambda: engine.wait(0.01).exits or (nodes.folder / "listens").exists())
    engine.down(3000.0) if how == "down" else nodes.shell().remove("j", 3000.0)
    assert (nodes.folder / "saved").exists()
    assert not (nodes.state / "j").exists()
    eventually(lambda: not engine.alive())


LISTENS = """import os, signal, socket
name = os.environ["NODE_SOCKET"]
signal.signal(15, signal.SIG_IGN if "stubborn" in name else lambda *_: os._exit(5))
with socket.socket(socket.AF_UNIX) as server:
    server.bind(name)
    server.listen()
    while True:
        server.accept()[0].close()  # otherwise, one of many connections would wait forever
"""


def test_a_node_must_be_terminated_first_and_killed_if_it_does_not_end(nodes, monkeypatch):
    monkeypatch.setattr(process, "NODE", nodes.folder / "node.py")
    (nodes.folder / "node.py").write_text(LISTENS)
    engine = nodes.session()
    engine.up(dataclasses.replace(nodes.plan(), nodes=("obedient", "stubborn", "discarded")))
    started = dict(engine.nodes)
    engine.discard(["discarded"])
    engine.down(0.0)
    codes = {name: not_none(node.child).wait() for name, node in started.items()}
    started["obedient"].signal(0)  # no error, although it is gone
    assert codes == {"obedient": 5, "stubborn": -signal.SIGKILL, "discarded": -signal.SIGKILL}


# --- from another shell


def test_jobs_must_list_only_jobs_whose_nodes_listen(nodes):
    engine = nodes.up("b")
    nodes.up("a")
    (nodes.state / "c").mkdir()
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(nodes.state / "c" / "master.sock"))  # no node listens on it
    expected = [JobState(name, "process", 2, nodes.run.resolve(), os.getuid()) for name in ("a", "b")]
    shell = nodes.shell()
    assert shell.jobs() == expected
    assert shell.resources("b") == [
        *(f"process {pid} ({name})" for name, pid in sorted(pids(engine).items())),
        f"folder {nodes.state / 'b'}",
    ]
    assert shell.resources("c") == [f"folder {nodes.state / 'c'}"]
    assert shell.resources("none") == []
    shell.remove("b", 30.0)
    eventually(lambda: not engine.alive())
    assert shell.jobs() == expected[:1] and shell.resources("b") == []


# --- nodes that are starting


def locked(lock: Path) -> bool:
    with lock.open() as file, contextlib.suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    return True


def test_a_node_must_hold_its_lock_as_long_as_it_lives(nodes):
    engine = nodes.up()
    lock = nodes.state / "j" / "master.lock"
    assert locked(lock)
    os.kill(pids(engine)["master"], signal.SIGKILL)
    eventually(lambda: not locked(lock))


def test_a_node_that_was_started_but_does_not_listen_yet_must_be_awaited(nodes):
    nodes.clock = clock = Clock()
    shell, folder, began = nodes.shell(), nodes.state / "j", clock.now
    lock, path = folder / "n.lock", folder / "n.sock"
    folder.mkdir(parents=True)
    lock.touch()
    (folder / "gone.lock").symlink_to("none")
    only = [f"folder {folder}"]
    assert shell.resources("j") == only and clock.now == began  # no node is starting
    with lock.open() as shared, lock.open() as held, socket.socket(socket.AF_UNIX) as server:
        fcntl.flock(shared, fcntl.LOCK_SH)  # another orchestrator that checks the lock
        assert shell.resources("j") == only and clock.now == began
        fcntl.flock(shared, fcntl.LOCK_UN)
        fcntl.flock(held, fcntl.LOCK_EX)
        assert shell.resources("j") == only
        assert 9 < clock.now - began < 11
        sleep = clock.sleep

        def listen(seconds: float) -> None:
            sleep(seconds)
            if not path.exists():
                server.bind(str(path))
                server.listen()

        clock.sleep = listen
        assert shell.resources("j") == [f"process {os.getpid()} (n)", *only]


def test_text_that_the_locale_cannot_encode_must_be_refused_before_nodes_start(nodes, monkeypatch):
    def ascii_only(text: str) -> bytes:
        return text.encode("ascii", "surrogateescape")

    monkeypatch.setattr("orchestrate.spec.spec.os.fsencode", ascii_only)
    for spec, key in (
        (dataclasses.replace(SPEC, env={"A": "x", "NAME": "é"}), "env.NAME"),
        (dataclasses.replace(SPEC, command=("work.py", "é")), "command"),
    ):
        with pytest.raises(EngineError, match=f"^{key} has characters that this locale's encoding"):
            nodes.shell().open(spec, nodes.plan(spec), nodes.run, str).up(nodes.plan(spec))
    assert not nodes.state.exists()


def test_preloaded_modules_must_see_only_the_gpus_of_the_job(cli, nothing_left):
    (cli.folder / "notes.py").write_text(
        "import os\nopen('seen', 'w').write(repr(os.environ['CUDA_VISIBLE_DEVICES']))\n"
    )
    (cli.folder / "hello.py").write_text("import notes\n")
    options = ("--engine", "process", "--trainers", "0", "--gpus", "none", "--set", "preload=[notes]")
    assert cli("run", *options, "--", "hello.py", CUDA_VISIBLE_DEVICES="7").returncode == 0
    assert (cli.folder / "seen").read_text() == "''"
