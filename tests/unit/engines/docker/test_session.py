"""Requests to a Docker Engine for a job, and the handling of its answers, with a fake engine."""

import dataclasses
import os
import socket
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.answers import SPEC, Framed, Job
from support.ends import KEY, End, listening
from support.messages import encoded
from support.plans import with_gpus
from support.scripted import Clock

from orchestrate.engines.docker import client as daemon_module
from orchestrate.engines.docker import session as docker_module
from orchestrate.engines.docker import toolkit
from orchestrate.errors import EngineError, EngineLost
from orchestrate.files.paths import PROJECT
from orchestrate.host import writable
from orchestrate.spec.spec import JobSpec


@pytest.fixture
def job(tmp_path, monkeypatch) -> Iterator[Job]:
    job = Job(tmp_path, monkeypatch)
    yield job
    job.close()


def request(node: dict[str, Any], what: str) -> str:
    return f"POST /containers/{node['Id']}/{what}"


# --- up


def test_healthy_nodes_must_be_left_alone(job):
    for name in ("master", "trainer-1"):
        job.answers.container(name)
    job.answers.container("trainer-1", "other", state="paused")
    engine = job.session()
    engine.up(job.plan())
    assert set(engine.nodes) == {"master", "trainer-1"}
    assert job.answers.requests() == [] and job.words() == []


@pytest.mark.parametrize(
    ("state", "networks", "done"),
    [
        ("exited", ["j_job"], ["start"]),
        ("paused", ["j_job"], ["kill", "start"]),
        ("running", [], ["kill", "connect", "start"]),
        ("running", ["other_job"], ["kill", "connect", "start"]),
        ("exited", [], ["connect", "start"]),
    ],
)
def test_an_unhealthy_node_must_be_brought_back_without_compose(job, state, networks, done):
    job.answers.network()
    job.answers.network("other")
    job.answers.network("other-j")  # its name ends like that of the job
    healthy, unhealthy = job.answers.container("master"), job.answers.container("trainer-1", state=state)
    unhealthy["NetworkSettings"]["Networks"] = dict.fromkeys(networks, {})
    job.session().up(job.plan())
    assert [asked.rpartition("/")[2] for asked in job.answers.requests()] == done
    assert not [asked for asked in job.answers.requests() if healthy["Id"] in asked]
    assert job.words() == []
    if "connect" in done:
        assert job.answers.query_of("POST /networks/net-j/connect")[1]["EndpointConfig"]["Aliases"] == ["trainer"]


def test_missing_nodes_must_be_created_by_compose(job):
    job.answers.container("master")
    job.compose(f"touch {job.folder}/up")
    job.answers.on_request = lambda what: (
        what == "GET /containers/json"
        and len(job.answers.containers) == 1
        and (job.folder / "up").exists()
        and job.answers.container("trainer-1")
    )
    job.session().up(job.plan())
    files = ["--file", str(PROJECT / "docker-compose.yml"), "--file", "-"]
    project = ["--project-name", "j", "--profile", "gpu", *files]
    options = ["--detach", "--no-build", "--no-recreate", "--pull", "never", "--scale", "trainer=1"]
    assert job.words()[5:] == [*project, "up", *options, "master", "trainer"]


def test_nodes_that_compose_does_not_bring_up_must_be_counted_in_the_error(job):
    job.answers.container("master")
    with pytest.raises(EngineError, match="Compose did not start 2 of 3 nodes"):
        job.session(JobSpec(trainers=2)).up(job.plan(JobSpec(trainers=2)))
    assert "trainer=2" in job.words()


def test_a_container_that_cannot_be_started_must_be_recreated_by_compose(job):
    job.answers.container("master")
    stopped = job.answers.container("trainer-1", state="exited")
    job.answers.refusals[request(stopped, "start")] = 500, "no such runtime"
    with pytest.raises(EngineError, match="did not start 1 of 2 nodes"):
        job.session().up(job.plan())
    assert job.words() and job.answers.query_of(f"DELETE /containers/{stopped['Id']}")[0]["v"] == "true"


def test_an_engine_that_is_lost_while_nodes_are_brought_back_must_be_reported(job):
    job.answers.container("master")
    stopped = job.answers.container("trainer-1", state="exited")
    job.answers.on_request = lambda what: what == request(stopped, "start") and 1 / 0
    with pytest.raises(EngineLost):
        job.session().up(job.plan())
    assert job.words() == []


def test_a_request_to_stop_must_end_compose(job, monkeypatch):
    monkeypatch.setattr(daemon_module, "COMPOSE_STOP_TIMEOUT", 0.1)
    job.compose("exec sleep 600")
    with pytest.raises(EngineError, match="did not exit in time"):
        job.session().up(job.plan(), lambda: True)


@pytest.mark.parametrize("path", ["code", "run"])
def test_a_folder_that_compose_cannot_mount_must_be_refused_by_name(job, path):
    run = job.run.rename(job.run.with_name("a\udcff")) if path == "run" else job.run
    code = "/a\udcff" if path == "code" else "/code"
    with pytest.raises(EngineError, match=r"/a.udcff' cannot be mounted: its name is not UTF-8") as caught:
        job.session(run=run, code=code).up(job.plan(code=code))
    assert caught.value.hint and job.answers.requests() == []


def test_compose_must_get_the_settings_of_the_job(job):
    spec = JobSpec(trainers=1, memory="3g", cpus=1.5, shm_size="512m", grace=60.0, image="mine:1")
    engine = job.settled(spec=spec, preload=("torch", "wave"))
    assert (
        engine.env.items()
        >= {
            "JOB_ID": "j",
            "JOB_OWNER": str(os.getuid()),
            "NODE_MODE": "agent",
            "NODE_KEY": KEY.hex(),
            "NODE_KEEP": "",
            "NODE_FILTERED": "1",
            "NODE_IMAGE": "mine:1",
            "NODE_CODE": "/code",
            "NODE_JOB_DIR": str(job.run),
            "NODE_USER": f"{job.run.stat().st_uid}:{job.run.stat().st_gid}",
            "NODE_RUNTIME": "runc",
            "NODE_GPUS": "void",
            "NODE_SHM": "512m",
            "NODE_MEMORY": str(3 << 30),
            "NODE_TMP": str(3 << 29),
            "NODE_PIDS": "8192",
            "NODE_CPUS": "1.5",
            "NODE_GRACE": "60.0",
            "NODE_PRELOAD": "torch wave",
            "NODE_SOCKETS": "/run/orchestrate",
        }.items()
    )
    job.answers.images, job.answers.volumes = {"built:1"}, ["/data"]
    unlimited = job.settled(image="built:1", python="/venv/bin/python", keep=90.0)
    changed = {"NODE_IMAGE": "built:1", "NODE_PYTHON": "/venv/bin/python", "NODE_KEEP": "90.0", "NODE_FILTERED": ""}
    assert unlimited.env.items() >= changed.items()
    assert (unlimited.env["NODE_MEMORY"], unlimited.env["NODE_CPUS"]) == ("0", "0")
    with pytest.raises(EngineError):
        unlimited.up(job.plan())
    assert job.env().items() >= unlimited.env.items()
    assert job.env()["NODE_WIPE"] == "/tmp /dev/shm /dev/mqueue /run/secrets /data"


def test_nodes_must_share_a_socket_folder_and_see_the_code_folder_without_ignored_files(job):
    code = job.folder / "my $code"
    for name in ("runs/a-1", ".git", "data/large", "src"):
        (code / name).mkdir(parents=True)
    for name in ("key.env", "train.py"):
        (code / name).touch()
    (code / ".dockerignore").write_text("# not code\ndata\n*.env\n__pycache__\nnone\n")
    with pytest.raises(EngineError):
        job.session(code=str(code)).up(job.plan(code=str(code)))
    folder, *hidden, sockets = job.given()
    bound = {"type": "bind", "bind": {"create_host_path": False}}
    assert folder == {**bound, "source": str(job.run), "target": "/job"}  # replaces Compose's volume
    hidden_mounts = {mount["target"]: (mount["type"], mount["read_only"]) for mount in hidden}
    empty = dict.fromkeys((f"/workspace/{name}" for name in (".git", "data", "runs")), ("tmpfs", True))
    assert hidden_mounts == empty | {"/workspace/key.env": ("bind", True)}
    assert {*job.engine().hidden(job.plan(code=str(code)), job.run)} == {".git", "data", "runs", "key.env"}
    assert sockets == {**bound, "source": str(job.sockets), "target": "/run/orchestrate"}
    assert stat.S_IMODE(job.sockets.stat().st_mode) == 0o700
    assert job.sockets.stat().st_uid == job.run.stat().st_uid  # nodes of root run as another user


def test_nodes_must_get_only_the_gpus_of_the_plan(job):
    engine = job.settled(gpus=with_gpus(4).gpus, spec=dataclasses.replace(SPEC, nproc_per_node=1, gpus="all"))
    assert (engine.env["NODE_RUNTIME"], engine.env["NODE_GPUS"]) == ("nvidia", "GPU-0,GPU-1")
    assert engine.devices == {}
    job.answers.info |= {"CDISpecDirs": ["/etc/cdi"]}  # instead of the runtime
    engine = job.session(gpus=with_gpus(4).gpus, spec=dataclasses.replace(SPEC, nproc_per_node=1, gpus="all"))
    assert (engine.env["NODE_RUNTIME"], engine.env["NODE_GPUS"]) == ("runc", "void")
    assert engine.devices == toolkit.service("cdi", ["GPU-0", "GPU-1"])
    with pytest.raises(EngineError):
        engine.up(job.plan())
    given = yaml.safe_load((job.folder / "given").read_text())["services"]
    assert engine.devices.items() < given["trainer"].items()


@pytest.mark.parametrize("network", ["bridge", "host"])
def test_the_mounts_that_a_job_can_write_must_be_known_to_later_ones(job, network):
    (job.folder / "mine").mkdir()
    mounts = [f"{job.folder}/mine:/x:rw", f"{job.folder}:/y"]
    job.session(JobSpec(trainers=0, network=network, mounts=mounts))
    known = {path for path, *_ in writable.known()}
    assert job.folder / "mine" in known and job.folder not in known


def test_a_job_on_the_host_network_must_use_the_second_compose_file(job):
    spec = JobSpec(trainers=0, network="host")
    engine = job.settled(spec=spec)
    with pytest.raises(EngineError):
        engine.up(job.plan(spec))
    files = [word for word in job.words() if word.endswith(".yml") or word == "-"]
    assert [Path(file).name for file in files] == ["docker-compose.yml", "host-network.yml", "-"]
    assert [mount["target"] for mount in job.given()] == ["/job"]
    assert not job.env()["NODE_SOCKETS"]  # nodes there share a host name, and so the name of the socket
    node = job.answers.container("master")
    node["NetworkSettings"]["Networks"] = {"host": {}}
    assert {*engine.alive()} == {"master"}


# --- nodes


def test_only_containers_running_on_the_jobs_network_must_count_as_nodes(job):
    engine = job.settled("master", "trainer-1", "trainer-2", "trainer-3", "trainer-12")
    for index, state in ((1, "exited"), (2, "paused")):
        job.answers.containers[index]["State"] = state
    job.answers.containers[3]["NetworkSettings"]["Networks"] = {"other_job": {}}
    assert {*engine.alive()} == {"master", "trainer-12"}


def test_a_container_that_is_being_stopped_must_be_waited_for_within_a_time_limit(job):
    engine = job.settled("master", "trainer-1")
    _, node = job.answers.containers
    engine.dying = {node["Id"]}
    job.answers.on_request = lambda what: (
        len(job.answers.asked) == 3 and node.update(State="exited")  # the engine's list shows it late
    )
    assert {*engine.alive()} == {"master"} and not engine.dying
    assert len(job.answers.asked) == 3
    node["State"], engine.dying = "running", {node["Id"]}
    clock = Clock()
    engine.clock = clock
    began = clock.now
    assert {*engine.alive()} == {"master", "trainer-1"} and not engine.dying
    assert 4 < clock.now - began < 6


def test_a_node_must_be_waited_for_only_after_a_signal_that_ends_it(job):
    engine = job.settled("master")
    (node,) = job.answers.containers
    for signal, dying in (("10", False), ("15", True)):
        engine._record_event(
            {"Type": "container", "Action": "kill", "Actor": {"ID": "x", "Attributes": {"signal": signal}}}
        )
        assert (engine.dying, engine.seen_events) == (({"x"}, {"x": {"kill"}}) if dying else (set(), {}))
    engine._record_event({"Type": "container", "Action": "kill", "Actor": {"ID": "y", "Attributes": {"signal": "9"}}})
    assert engine.dying == {"x", "y"}
    engine._record_event({"Type": "container", "Action": "die", "Actor": {"ID": "x", "Attributes": {}}})
    assert engine.dying == {"y"}
    engine._record_event({"Type": "container", "Action": "destroy", "Actor": {"ID": "z", "Attributes": {}}})
    assert engine.seen_events.pop("z") == {"destroy"} and engine.seen_events == {"x": {"kill", "die"}, "y": {"kill"}}
    assert node["State"] == "running"


# --- connections


def play_node(folder: Path, name: str, message: bytes) -> socket.socket:
    """Listen on a socket like a node, and send `message` to the first client that asks for its status."""
    folder.mkdir(exist_ok=True)
    server = listening(folder, name)

    def answer() -> None:
        connection, _ = server.accept()
        with connection:
            node = End(connection, listens=True)
            assert node.hear() == {"ask": "status"}
            node.send(message)
            while connection.recv(1000):
                pass

    threading.Thread(target=answer, daemon=True).start()
    return server


KNOWS = encoded("status", codes={"0": 0, "1": 3}, hints={"0": "", "1": ""})


def test_a_node_on_the_same_kernel_must_be_reached_by_its_socket(job, monkeypatch):
    master, trainer = job.answers.container("master"), job.answers.container("trainer-1")
    names = [node["Id"][:12] for node in (master, trainer)]
    assert names == ["j-master-000", "j-trainer-1-"]
    monkeypatch.setattr(docker_module, "LISTEN_TIMEOUT", 30.0)
    job.answers.started = time.strftime("%Y-%m-%dT%H:%M:%S.123456789Z", time.gmtime())
    servers = [play_node(job.sockets, names[0], KNOWS)]
    late = threading.Timer(0.1, lambda: servers.append(play_node(job.sockets, names[1], KNOWS)))
    late.start()
    engine = job.session()
    assert engine.adopt(job.plan()) == set()
    assert sorted((end.rank, end.code) for end in engine.wait(0).exits) == [(0, 0), (1, 3)]
    assert job.answers.requests() == []
    late.join()
    for server in servers:
        server.close()


@pytest.mark.parametrize("why", ["network", "Docker Desktop", "no socket"])
def test_a_node_must_be_reached_through_the_engine_if_its_socket_cannot_be_used(job, why):
    def speak(connection: socket.socket) -> None:
        node = Framed(connection)
        assert node.hear() == {"ask": "status"}
        node.send(KNOWS)
        while connection.recv(1000):
            pass

    job.answers.speaks = speak
    spec = dataclasses.replace(SPEC, network="host" if why == "network" else "bridge")
    job.answers.info["OperatingSystem"] = "Docker Desktop" if why == "Docker Desktop" else "Debian"
    nodes = [job.answers.container(name) for name in ("master", "trainer-1")]
    job.answers.refusals[f"GET /containers/{nodes[0]['Id']}/json"] = 500, "busy"  # so that its start is unknown
    job.sockets.mkdir()
    engine = job.session(spec)
    assert engine.adopt(job.plan(spec)) == set()
    assert engine.env["NODE_SOCKETS"] == ("/run/orchestrate" if why == "no socket" else "")
    execs = [asked for asked in job.answers.requests() if asked.endswith("/exec")]
    assert sorted(execs) == [request(node, "exec") for node in nodes]
    command = job.answers.query_of(execs[0])[1]["Cmd"]
    assert command[:3] == ["python", "-I", "-S"] and command[-1].endswith("node/programs/pipe.py")


@pytest.mark.parametrize(("state", "lost"), [("paused", False), ("exited", True), ("", True)])
def test_an_unreachable_node_must_be_lost_unless_it_may_recover(job, state, lost):
    job.answers.container("master")["State"] = "exited"
    if state:
        node = job.answers.container("trainer-1", state=state)
        job.answers.refusals[request(node, "exec")] = 409, f"is {state}"
    job.answers.refusals[request(job.answers.containers[0], "exec")] = 409, "is not running"
    engine = job.session()
    if lost:
        assert engine.adopt(job.plan()) == set()
        assert [(end.rank, end.code) for end in engine.wait(0).exits] == [(0, 137), (1, 137)]
    else:
        with pytest.raises(EngineLost, match="trainer-1 does not respond"):
            engine.adopt(job.plan())


def test_the_state_of_a_container_must_be_queried_again_after_its_connection_ended(job):
    engine = job.settled("master", "trainer-1")
    old = engine.nodes["master"]
    assert engine.runs("master") and engine.nodes["master"] is not old
    assert not engine.runs("trainer-2")
    job.answers.containers[1]["State"] = "exited"
    assert not engine.runs("trainer-1")
    job.answers.containers[1]["State"] = "paused"
    with pytest.raises(EngineLost, match="trainer-1 is paused"):
        engine.runs("trainer-1")
