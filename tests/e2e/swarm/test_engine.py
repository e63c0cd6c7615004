"""The Swarm engine with real nodes on this machine; only Swarm itself is fake."""

import dataclasses
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from support.manager_stub import StubManager
from support.plans import HERE, Site, plan
from support.ports import free_port
from support.processes import die_with_parent
from support.repo import ROOT
from support.waiting import eventually

from orchestrate.engines import node_clients
from orchestrate.engines.base import Stop
from orchestrate.engines.connection import NodeConnection
from orchestrate.engines.swarm import session as swarm_module
from orchestrate.engines.swarm.engine import SwarmEngine
from orchestrate.engines.swarm.objects import SwarmJob
from orchestrate.engines.swarm.session import PIPE, SwarmSession
from orchestrate.errors import EngineError, EngineLost
from orchestrate.host import records, users
from orchestrate.node.lease import answer
from orchestrate.plan.plan import Plan
from orchestrate.record.paths import JobPaths
from orchestrate.spec.spec import JobSpec

WRITES = """import os, pathlib, sys
rank, generation = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
job_dir = pathlib.Path("..")  # as JOB_DIR, which is relative to the node's own working directory here
print("found", *sorted(path.name for path in job_dir.glob("of-*")))
(job_dir / f"of-{rank}-{generation}").write_text("x" * 100)
if "wait" in sys.argv:
    sys.stdin.read() or __import__("time").sleep(600)
raise SystemExit(int(sys.argv[1]) if rank == "1" else 0)
"""


class Hosts:
    """Processes instead of the containers that Swarm would start, and connections to them."""

    def __init__(self, folder: Path, stub: StubManager, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.stub = folder, stub
        self.paths, self.code = JobPaths(folder / "j"), folder / "project"
        self.paths.create(owner=users.nodes_of(JobSpec().user))
        self.run = self.paths.shared
        self.code.mkdir()
        (self.code / "train.py").write_text(WRITES)
        self.at: dict[str, tuple[int, subprocess.Popen[bytes]]] = {}  # port and node by address
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}  # by task id
        self.commands: list[list[str]] = []  # that nodes were reached with
        self.links: list[NodeConnection] = []
        self.sessions: list[SwarmSession] = []
        self.relay = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.relay.bind(("127.0.0.1", 0))
        self.renewed = 0  # number of renewed leases
        self.leases = threading.Thread(target=self.renew, daemon=True)
        self.leases.start()
        monkeypatch.setattr(SwarmJob, "relay_address", lambda _: self.relay.getsockname())
        stub.placed, stub.last_listed = self.start, self.look

    def renew(self) -> None:
        while question := self.relay.recvfrom(64):
            if not question[0]:
                return
            self.renewed += 1
            self.relay.sendto(answer(bytes.fromhex(records.need(self.paths.root).key), question[0]), question[1])

    def start(self, task: dict) -> None:
        folder, port = self.folder / task["ID"], free_port()
        folder.mkdir()
        settings = {"NODE_MODE": "agent", "NODE_SOCKET": str(folder / "s"), "NODE_PORT": str(port), "NODE_GRACE": "1"}
        self.nodes[task["ID"]] = subprocess.Popen(
            [sys.executable, str(ROOT / "orchestrate" / "node")],
            env=os.environ | settings | {"NODE_KEY": records.need(self.paths.root).key},
            cwd=folder,
            stdout=subprocess.DEVNULL,
            preexec_fn=die_with_parent,
        )
        address = task["NetworksAttachments"][-1]["Addresses"][0].partition("/")[0]
        self.at[address] = port, self.nodes[task["ID"]]

    def look(self) -> None:
        """Update Swarm's tasks with the nodes that have ended."""
        for task in self.stub.tasks:
            if task["ID"] in self.nodes and self.nodes[task["ID"]].poll() is not None:
                task["Status"]["State"] = "failed"

    def connect_by_exec(
        self, container: str, command: list[str], key: bytes, patience: float = 0.0
    ) -> NodeConnection | None:
        """Connect to a node as the relay's `exec` of pipe.py does."""
        assert (container, command[:4]) == (self.stub.containers[0]["Id"], PIPE)
        address, port, _ = command[4:]
        assert port == "20001"
        self.commands.append(command)

        sock = eventually(lambda: self.dial(address))
        if isinstance(sock, str):
            return None
        link = NodeConnection(sock, key)
        self.links.append(link)
        return link if link.greet(patience) else None

    def dial(self, address: str) -> socket.socket | str:
        """A connection to a node; "" while it does not listen yet, "ended" if it has ended."""
        port, node = self.at[address]
        try:
            return socket.create_connection(("127.0.0.1", port))
        except OSError:
            return "" if node.poll() is None else "ended"

    def engine(self, spec: JobSpec, plan: Plan | None = None) -> SwarmSession:
        swarm_engine = SwarmEngine()
        swarm_engine.manager.daemon.connect_by_exec = self.connect_by_exec
        self.sessions.append(swarm_engine.open(spec, plan or self.plan(spec), self.run, lambda warning: None))
        return self.sessions[-1]

    def plan(self, spec: JobSpec, generation: int = 0, nodes: tuple[str, ...] = ()) -> Plan:
        here = HERE.but(engine="swarm", master_addr="127.0.0.1", interface="lo")
        site = here.but(job_dir="job", code=str(self.code), sent=True)
        more: dict[str, Any] = {"nodes": nodes} if nodes else {}
        return plan(spec, site, "j", free_port(), generation=generation, **more)

    def close(self) -> None:
        for engine in self.sessions:
            if engine.sync:
                engine.sync.close()
            engine.pool.shutdown()
            engine.kept.close()
        for link in self.links:
            link.close()
        for node in self.nodes.values():
            node.terminate()
            node.wait()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
            end.sendto(b"", self.relay.getsockname())
        self.leases.join()
        self.relay.close()


@pytest.fixture
def local_hosts(stub, tmp_path, monkeypatch):
    instance = Hosts(tmp_path, stub, monkeypatch)
    yield instance
    instance.close()


def ends(engine: SwarmSession, count: int) -> dict[int, int]:
    """Wait until `count` workers have ended; return their exit codes by rank."""
    found: dict[int, int] = {}
    while len(found) < count:
        found |= {end.rank: end.code for end in engine.wait(5).exits}
    return found


def started(engine: SwarmSession, job_plan: Plan, *command: str) -> None:
    engine.start(dataclasses.replace(job_plan, command=("train.py", *command)))


def test_a_job_must_get_its_code_deliver_its_files_and_leave_nothing_on_the_hosts(local_hosts, stub):
    spec = JobSpec(trainers=1, grace=1.0)
    engine = local_hosts.engine(spec)
    job_plan = local_hosts.plan(spec)
    engine.up(job_plan)
    assert {*engine.alive()} == {"master", "trainer-1"}
    # The connections that uploaded the code are closed.
    assert local_hosts.links and all(link.sock.fileno() < 0 for link in local_hosts.links)
    assert engine.alive() == {"master": "host-2", "trainer-1": "host-1"}
    # The time that a new node may take to listen.
    assert {float(command[-1]) for command in local_hosts.commands} == {20.0}
    local_hosts.commands.clear()
    started(engine, job_plan, "3")
    assert ends(engine, 2) == {0: 0, 1: 3}
    assert {float(command[-1]) for command in local_hosts.commands} == {2.0}  # by now the nodes listen
    for rank in (0, 1):  # without waiting for files that are still being copied
        assert local_hosts.paths.log(rank).read_text() == "found\n"
        assert (local_hosts.run / f"of-{rank}-0").read_text() == "x" * 100
    assert eventually(lambda: local_hosts.renewed)
    engine.down(1.0)
    assert not stub.services and not stub.containers and not stub.overlays() and not stub.secrets
    assert [node.wait(30) for node in local_hosts.nodes.values()] == [0, 0]


def test_a_lost_node_must_be_replaced_by_one_with_all_files_written_so_far(local_hosts, stub):
    spec = JobSpec(trainers=1, grace=1.0)
    engine = local_hosts.engine(spec)
    job_plan = local_hosts.plan(spec)
    engine.up(job_plan)
    started(engine, job_plan, "0", "wait")
    eventually(lambda: engine.wait(0.1).exits or all((local_hosts.run / f"of-{rank}-0").exists() for rank in (0, 1)))
    lost = stub.task("trainer-1")
    log = b"[rank 1] found\n[rank 1] the last line\n"
    prefix = f"com.docker.swarm.task.id={lost['ID']} ".encode()
    stub.log = b"".join(
        bytes([1, 0, 0, 0]) + len(line).to_bytes(4, "big") + line
        for line in (prefix + text for text in log.splitlines(keepends=True))
    )
    local_hosts.nodes[lost["ID"]].kill()
    (end,) = eventually(lambda: engine.wait(0.1).exits)
    assert (end.rank, end.code, engine.explain(end, "trainer-1")) == (1, 137, "node lost")
    engine.stop(Stop.KILL)
    assert ends(engine, 1)
    assert local_hosts.paths.log(1).read_text().splitlines() == ["found", "the last line"]
    assert {*engine.alive()} == {"master"}
    engine.up(job_plan)
    assert {*engine.alive()} == {"master", "trainer-2"} and len(stub.tasks) == 3
    engine.gather(lambda: False)
    job_plan, link = local_hosts.plan(spec, 1, ("master", "trainer-2")), engine.clients.connections["master"]
    started(engine, job_plan, "0")
    assert engine.clients.connections["master"] is link
    assert ends(engine, 2) == {0: 0, 1: 0}
    for rank in (0, 1):  # the node that stayed and the new one
        assert local_hosts.paths.log(rank).read_text().endswith("found of-0-0 of-1-0\n")
    engine.down(1.0)
    assert (local_hosts.run / "of-1-1").exists() and not stub.services


def test_a_supervisor_that_takes_over_must_find_the_workers_and_their_files(local_hosts, stub):
    spec = JobSpec(trainers=1, grace=1.0)
    engine = local_hosts.engine(spec)
    job_plan = local_hosts.plan(spec)
    engine.up(job_plan)
    started(engine, job_plan, "0", "wait")
    eventually(lambda: len(engine.clients.pids) == 2 or engine.wait(0.1).exits)
    engine.sync.close()
    for node in list(engine.clients.connections):
        engine.clients.drop(node)
    another = local_hosts.engine(spec)
    assert another.adopt(job_plan) == set()
    assert another.clients.running == {0: "master", 1: "trainer-1"} and len(stub.containers) == 1
    earlier = another.sync
    another.adopt(job_plan)  # as after a lost engine
    assert not any(thread.is_alive() for thread in earlier.threads)
    another.stop(Stop.KILL)
    assert ends(another, 2)
    assert (local_hosts.run / "of-1-0").exists()
    another.down(1.0)
    assert not stub.services


@pytest.fixture
def on_cluster(local_hosts):
    """A session of a job on a cluster with one node, the job's plan, and its files."""
    spec = JobSpec(trainers=0, grace=1.0)
    job_plan = local_hosts.plan(spec)
    of_cluster = Site(job_plan.inventory, job_plan.placement).but(cluster="j", job_dir="job/of-a-job")
    job = plan(spec, of_cluster, "of-a-job", free_port())
    local_hosts.paths = cluster = JobPaths(local_hosts.folder / "runs" / "j")
    cluster.create_cluster(users.nodes_of(spec.user))
    job_paths = JobPaths(local_hosts.folder / "runs" / "of-a-job")
    job_paths.create("j")
    local_hosts.run = cluster.nodes
    engine = local_hosts.engine(spec, job)
    engine.up(job)
    return engine, job, job_paths


def test_nodes_of_a_cluster_must_outlive_a_job_and_keep_its_files_separate(local_hosts, stub, on_cluster):
    engine, job, job_paths = on_cluster
    started(engine, job, "0")
    assert ends(engine, 1) == {0: 0}
    assert job_paths.log(0).exists() and not (local_hosts.paths.nodes / "logs").exists()
    engine.down(1.0)
    assert stub.services and stub.containers
    assert local_hosts.nodes[stub.task("master")["ID"]].poll() is None


@pytest.mark.parametrize("when", ["at the end", "in an earlier generation"])
def test_a_node_of_a_cluster_that_cannot_be_cleaned_and_does_not_end_must_be_reported(
    local_hosts, stub, on_cluster, monkeypatch, when
):
    engine, job, _ = on_cluster
    started(engine, job, "0")
    assert ends(engine, 1) == {0: 0}
    monkeypatch.setattr(node_clients, "ANSWER_TIMEOUT", 0.5)
    monkeypatch.setattr(swarm_module, "UNCLEAN_TIMEOUT", 0.5)
    engine.sync.close()
    engine.sync = None
    node = local_hosts.nodes[stub.task("master")["ID"]]
    node.send_signal(signal.SIGSTOP)
    if when == "in an earlier generation":
        engine.discard(["master"])
    try:
        with pytest.raises(EngineError, match="master could not be cleaned: what the job has started may still run"):
            engine.down(1.0)
    finally:
        node.send_signal(signal.SIGCONT)


def test_an_unreachable_node_must_be_reported_and_no_longer_used(local_hosts, stub):
    spec = JobSpec(trainers=1)
    engine = local_hosts.engine(spec)
    talk = local_hosts.connect_by_exec
    engine.manager.daemon.connect_by_exec = lambda *arguments: talk(*arguments) if "10.0.1.1" in arguments[1] else None
    with pytest.raises(EngineError, match="cannot connect to trainer-1 on host-1") as raised:
        engine.up(local_hosts.plan(spec))
    assert "7946/tcp" in raised.value.hint
    assert not engine.alive()  # not all nodes have the code
    engine.manager.daemon.connect_by_exec = talk
    engine.up(local_hosts.plan(spec))
    assert {*engine.alive()} == {"master", "trainer-2"}


BUSY = {"State": "failed", "Err": "starting container failed: unable to remount: device or resource busy"}


def test_a_node_whose_container_does_not_start_must_be_replaced(local_hosts, stub):
    spec = JobSpec(trainers=1)
    engine = local_hosts.engine(spec)
    place = stub.placed

    def placed(task: dict) -> None:
        if len(stub.tasks) == 1:
            task["Status"] = BUSY
        else:
            place(task)

    stub.placed = placed
    engine.up(local_hosts.plan(spec))
    assert {*engine.alive()} == {"master", "trainer-2"}


def test_a_node_whose_replacements_do_not_start_must_be_reported(local_hosts, stub, monkeypatch):
    monkeypatch.setattr(swarm_module, "PENDING_TIMEOUT", 0.5)
    spec = JobSpec(trainers=0)
    engine = local_hosts.engine(spec)
    stub.placed = lambda task: task.update(Status=BUSY)
    with pytest.raises(EngineError, match="device or resource busy"):
        engine.up(local_hosts.plan(spec))
    assert len(stub.tasks) > 1  # it was replaced


def test_a_node_must_not_be_abandoned_if_the_engine_does_not_answer(local_hosts):
    spec = JobSpec(trainers=0)
    engine = local_hosts.engine(spec)

    def connect_by_exec(*_: object) -> None:
        raise EngineLost("the engine does not respond")

    engine.manager.daemon.connect_by_exec = connect_by_exec
    with pytest.raises(EngineLost):
        engine.up(local_hosts.plan(spec))
    assert not engine.abandoned


def test_a_failed_upload_to_a_node_must_be_reported(local_hosts, stub):
    spec = JobSpec(trainers=0)
    engine = local_hosts.engine(spec)
    place = stub.placed

    def placed(task: dict) -> None:
        place(task)
        (local_hosts.folder / task["ID"] / "job").mkdir()
        (local_hosts.folder / task["ID"] / "job" / "work").touch()  # a file in place of the folder

    stub.placed = placed
    with pytest.raises(EngineError, match="File exists"):
        engine.up(local_hosts.plan(spec))
    assert not engine.alive()


def test_a_node_must_get_the_code_only_if_it_has_changed(local_hosts, stub):
    spec = JobSpec(trainers=0)
    engine = local_hosts.engine(spec)
    engine.up(local_hosts.plan(spec))
    code = local_hosts.folder / stub.task("master")["ID"] / "job" / "work"
    (code / "mark").touch()  # which a second upload would remove
    engine.up(local_hosts.plan(spec))
    another = local_hosts.engine(spec)
    another.up(local_hosts.plan(spec))
    assert (code / "mark").exists()
    (local_hosts.code / "train.py").write_text("changed")
    local_hosts.engine(spec).up(local_hosts.plan(spec))
    assert not (code / "mark").exists() and (code / "train.py").read_text() == "changed"
