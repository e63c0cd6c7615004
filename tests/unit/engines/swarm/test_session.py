"""Which nodes the Swarm engine starts, awaits and uses; with a simulated Swarm, nodes and clock."""

import contextlib
import dataclasses
import tarfile
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.ends import KEY
from support.manager_stub import host
from support.messages import encoded, message
from support.plans import Site
from support.swarm_nodes import SPEC, connected, down, job, state

from orchestrate.engines.connection import LARGE, NodeConnection
from orchestrate.engines.registry import select_engine
from orchestrate.engines.swarm import engine as engine_module
from orchestrate.engines.swarm import session as swarm
from orchestrate.engines.swarm.engine import SwarmEngine
from orchestrate.engines.swarm.session import SwarmSession
from orchestrate.engines.swarm.upload import on_each, packed
from orchestrate.errors import ResourceError, UsageError
from orchestrate.host import records
from orchestrate.node.messages import protocol
from orchestrate.spec.spec import IMAGE, JobSpec


@pytest.fixture
def code(stub, tmp_path, monkeypatch):
    """The code folder of a planned job."""
    monkeypatch.setattr(engine_module, "code_folder", lambda command: tmp_path / "code")
    (tmp_path / "code").mkdir()
    return tmp_path / "code"


@pytest.mark.parametrize(("image", "expected"), [("mine:1", ["mine:1", IMAGE]), (IMAGE, [IMAGE])])
def test_the_relay_image_must_be_present_before_anything_is_started(stub, monkeypatch, image, expected):
    checked = []
    monkeypatch.setattr(engine_module, "ensure_image", lambda daemon, spec: checked.append(spec.image))
    SwarmEngine().prepare(JobSpec(image=image), Path("run"))
    assert checked == expected


def test_resources_of_hosts_must_be_counted_for_the_nodes_that_they_take(stub, code, tmp_path):
    stub.hosts = [host(1, cpus=8, gpus=2), host(2, cpus=4, gpus=2), host(3, cpus=2, gpus=8, availability="drain")]
    found = Site(*SwarmEngine().inventory(JobSpec(trainers=3), tmp_path / "j", run_image=False))
    assert "of 2 hosts, image orchestrate-node:0.1" in found.about and "26.1.5" in found.about
    assert len(found.cores) == 8  # two nodes on each host, and the smaller one has four cores
    assert (found.engine, found.gpus, found.network) == ("swarm", ("NVIDIA-GPU",) * 4, "bridge")
    assert (found.job_dir, found.code, found.interface, found.master_addr) == ("/var/tmp/job", str(code), "", "")
    assert (found.memory, found.hosts, found.sent) == (8 << 30, 2, True)
    second = Site(
        *SwarmEngine().inventory(JobSpec(constraints=["node.hostname==host-2"]), tmp_path / "j", run_image=False)
    )
    assert (second.memory, second.hosts, len(second.cores)) == (16 << 30, 1, 4)


@pytest.mark.parametrize(("trainers", "cores"), [(0, 4), (1, 8), (2, 6), (30, 7)])
def test_cores_per_node_must_be_limited_by_the_smallest_host(stub, code, tmp_path, trainers, cores):
    found = Site(*SwarmEngine().inventory(JobSpec(trainers=trainers), tmp_path, run_image=False))
    assert len(found.cores) == cores


def test_a_host_with_unknown_resources_must_count_as_one_core(stub, code, tmp_path):
    stub.hosts[0]["Description"]["Resources"] = {}
    found = Site(*SwarmEngine().inventory(SPEC, tmp_path, run_image=False))
    assert (found.cores, found.memory) == ((0,), 0)


def test_nodes_must_import_the_modules_that_the_job_names(stub, code, tmp_path):
    found = Site(*SwarmEngine().inventory(JobSpec(preload=["wave"]), tmp_path, run_image=False))
    assert "wave" in found.preload


def test_a_job_must_get_only_the_gpus_that_it_requests_and_its_files_on_the_volume(stub, code, tmp_path):
    stub.hosts = [host(1, gpus=2)]
    spec = JobSpec(gpus="none", volume="data", network="host")
    found = Site(*SwarmEngine().inventory(spec, tmp_path / "j" / "job", run_image=False))
    assert (found.gpus, found.job_dir, found.network, found.sent) == ((), "/shared/j", "host", False)
    assert "NVIDIA-GPU" in found.no_gpus
    spares = JobSpec(trainers=0, spares=1)
    assert (
        len(Site(*SwarmEngine().inventory(spares, tmp_path, run_image=False)).gpus) == 1
    )  # and one for the spare node


def test_a_swarm_without_a_ready_host_must_be_reported(stub, code, tmp_path):
    stub.hosts = [host(1, availability="pause"), host(2, state="down")]
    with pytest.raises(ResourceError, match="no host of the Swarm is ready"):
        Site(*SwarmEngine().inventory(SPEC, tmp_path, run_image=False))


UNSUPPORTED: dict[str, list[dict[str, Any]]] = {
    "pin, share_gpus and virtual_local_rank": [{"pin": True}, {"share_gpus": True}, {"virtual_local_rank": True}],
    "keep": [{"keep": 60.0}],
    "data and mounts": [{"data": "/data"}, {"mounts": ["/m:/m:ro"]}],
    "ports, services and stdin": [{"ports": ["127.0.0.1:80:80"]}, {"services": "services.yml"}, {"stdin": True}],
    "pip, requirements and dockerfile": [{"pip": ["numpy"]}, {"dockerfile": "Dockerfile"}],
}


@pytest.mark.parametrize(("names", "settings"), [(names, one) for names, all in UNSUPPORTED.items() for one in all])
def test_settings_that_a_swarm_does_not_support_must_be_refused_before_it_is_asked(names, settings):
    with pytest.raises(UsageError, match=f"^Docker Swarm does not support {names}(\n|$)"):
        select_engine(JobSpec(engine="swarm", **settings))


@pytest.mark.parametrize("volume", ["/run", "//run", "/var//run/x", "/mnt/../dev/shm", "/.", "//", "/usr/../.", "/var"])
def test_a_volume_with_the_systems_own_folders_must_be_refused(volume):
    with pytest.raises(UsageError, match="is a system folder"):
        select_engine(JobSpec(engine="swarm", volume=volume))


def test_code_that_is_too_large_must_be_refused_before_anything_is_started(stub, code, tmp_path):
    with (code / "weights.bin").open("wb") as file:
        file.truncate(300 << 20)
    with pytest.raises(ResourceError, match="more than 256 MB"):
        Site(*SwarmEngine().inventory(SPEC, tmp_path, run_image=False))


def test_run_directories_must_not_be_sent_with_the_code(engine, stub, code, tmp_path):
    for name in ("train.py", "out/j/job/secret"):
        (code / name).parent.mkdir(parents=True, exist_ok=True)
        (code / name).touch()
    with (code / "out" / "large").open("wb") as file:
        file.truncate(300 << 20)
    SwarmEngine().inventory(SPEC, code / "out" / "j" / "job", run_image=False)  # the code is not too large
    engine.swarm.run, engine._on_each = code / "out" / "j" / "job", lambda nodes, act: []
    SwarmSession._send_code(engine, code, [])
    file, _ = engine.code
    with tarfile.open(fileobj=file) as archive:
        assert archive.getnames() == ["train.py"]
    engine.kept.close()


def test_a_node_without_the_code_must_not_count(engine):
    engine.have_code = {"t0", "t2"}
    assert {*engine.alive()} == {"master", "trainer-1"}


def start(engine: SwarmSession) -> None:
    engine._send_files = lambda workers, stopped=None: None
    engine._start_sync = lambda workers: None
    engine.clients.connect = lambda nodes: None
    engine.clients._start = lambda worker: None
    engine.start(job())


def test_the_next_generation_must_wait_for_the_lease_of_a_lost_node(engine, clock):
    began, until = clock.now, clock.now + 9
    engine.lease_ends, engine.asked = {"t0": until, "t1": clock.now - 1}, {"trainer-1": clock.now}
    ended: list[float] = []
    engine.sync = SimpleNamespace(close=lambda: ended.append(clock.now))
    start(engine)
    assert ended == [began]  # the old copier must not see the files that the next generation is sent
    assert until <= clock.now < until + 1
    assert not engine.lease_ends and not engine.asked and engine.first == "master"


def test_the_next_generation_must_not_wait_for_the_lease_of_an_ended_node(engine, stub, clock):
    began, engine.lease_ends = clock.now, {"t0": clock.now + 9}
    state(stub, "trainer-1", "failed")
    start(engine)
    assert clock.now == began
    down(stub, 1)  # on an unreachable host, Swarm cannot know whether it ended
    engine.lease_ends = {"t0": clock.now + 9}
    start(engine)
    assert clock.now >= began + 9


def test_a_connection_to_an_earlier_node_with_the_same_name_must_not_be_used(engine, stub, clock):
    connected(engine, "master", "trainer-1", "trainer-2")
    stub.place(stub.services[0], 1)  # a new trainer-1
    engine.abandoned = {"t1"}  # trainer-2, which accepts no files
    start(engine)
    assert set(engine.clients.connections) == {"master"}


def test_the_lease_of_a_lost_worker_must_count_from_the_last_message_of_its_node(engine, clock):
    connected(engine, "master", "trainer-1", "trainer-2")
    engine.ends["trainer-1"].send(encoded("status"))
    engine.wait(0.01)
    last_message = clock.now
    clock.now += 5
    engine.clients.mark_lost([1, 2])
    assert engine.lease_ends == {"t0": last_message + swarm.LEASE_OVER_AFTER, "t1": clock.now + swarm.LEASE_OVER_AFTER}
    assert engine.lost == {1: "trainer-1", 2: "trainer-2"} and engine.clients.running == {0: "master"}


def test_workers_on_the_host_network_must_get_the_address_of_the_masters_host(stub, tmp_path):
    spec = dataclasses.replace(SPEC, trainers=1, network="host")
    records.make(tmp_path.parent, KEY)
    session = SwarmEngine().open(spec, job(spec, network="host"), tmp_path, lambda warning: None)
    for role in ("master", "trainer"):
        session.swarm.scale(role, 1)
    session._update_nodes()
    session.first = "master"
    stub.hosts[0]["Status"]["Addr"] = "10.1.1.7"
    session.manager.hosts()
    for worker in job(spec).workers:  # each on its own host
        request = session.request(worker, ())
        assert request.env == worker.env | {"MASTER_ADDR": "10.1.1.7"} and worker.env["MASTER_ADDR"] == "master"
        assert (request.inherit, request.cwd, request.log) == (True, "/var/tmp/code", 0)


def test_a_start_request_must_contain_the_current_length_of_the_log(engine, tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-1.log").write_text("so far")
    found = [engine.request(worker, ()) for worker in job().workers]
    assert [one.log for one in found] == [0, 6, 0]
    assert [one.env for one in found] == [worker.env for worker in job().workers]


@pytest.mark.parametrize("missing", ["task", "relay", "given up"])
def test_connect_must_not_try_to_reach_a_node_that_is_gone(engine, missing):
    engine.swarm.connect()
    engine.manager.daemon.connect_by_exec = lambda *_: pytest.fail("it is not to be reached")
    if missing == "task":
        engine.nodes.pop("trainer-1")
    elif missing == "relay":
        engine.swarm.relay = None
    else:
        engine.abandoned = {"t0"}
    assert engine.connect("trainer-1") is None


class NodeWithFiles:
    """A connection to a node that has these files, and received the upload with this tag."""

    def __init__(self, files: dict[str, list[int]], tag: str = "") -> None:
        self.files, self.tag, self.uploads = files, tag, 0

    def converse(self, request: protocol.Request, answer: type, *_: object, **__: object) -> protocol.Report:
        self.uploads += isinstance(request, protocol.Upload)
        return (
            message("status", tags={"/job": self.tag})
            if answer is protocol.Status
            else message("changes", files=self.files)
        )


def test_files_must_be_sent_only_to_nodes_that_need_them(engine, tmp_path):
    (tmp_path / "state.pt").write_text("saved")
    (tmp_path / "last").symlink_to("gone")
    status = (tmp_path / "state.pt").stat()
    facts = [status.st_size, status.st_mtime_ns, 1, 0o644]
    with packed(tmp_path, [tmp_path / "state.pt", tmp_path / "last"], tmp_path) as (_, digest):
        nodes = {
            "master": NodeWithFiles({"state.pt": facts}),
            "trainer-1": NodeWithFiles({}, digest),
            "trainer-2": NodeWithFiles({"state.pt": [5, 1, 1, 0o644]}, "of an earlier generation"),
        }
    engine._on_each = lambda names, act: [act(nodes[name]) for name in names]
    engine._send_files(job().workers)
    assert [node.uploads for node in nodes.values()] == [0, 0, 1]
    engine.shared = True  # all nodes share one folder
    engine._send_files(job().workers)
    assert nodes["trainer-2"].uploads == 1
    engine.shared = False
    (tmp_path / "state.pt").unlink()
    (tmp_path / "last").unlink()
    engine._send_files(job().workers)  # nothing to send
    assert nodes["trainer-2"].uploads == 1


@pytest.mark.parametrize("size", [LARGE + 1, LARGE])
def test_only_one_large_list_must_be_compared_at_a_time(engine, tmp_path, size):
    large, met = size > LARGE, []
    together = threading.Barrier(2, timeout=0.5 if large else 20)

    class Node(NodeWithFiles):
        def converse(self, request: protocol.Request, answer: type, *_: object, **more: Any) -> protocol.Report:
            if answer is protocol.Changes:
                more["admit"](size)
                with contextlib.suppress(threading.BrokenBarrierError):
                    met.append(together.wait())
            return super().converse(request, answer)

        def close(self) -> None:
            pass

    (tmp_path / "state.pt").write_text("saved")
    engine._on_each = lambda names, act: on_each([*names][:2], lambda name: cast(NodeConnection, Node({})), act)
    engine._send_files(job().workers)
    assert bool(met) != large
