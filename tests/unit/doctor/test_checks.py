"""Findings of `doctor` on fake hosts; see tests/e2e/swarm for real ones, whose clocks cannot differ."""

import base64
import dataclasses
import hashlib
import io
import os
import socket
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from support.messages import message
from support.plans import HERE, Site

from orchestrate.cli.commands.doctor import examine
from orchestrate.doctor import checks, findings
from orchestrate.engines import check_cache
from orchestrate.engines.base import JobState
from orchestrate.engines.ports import free_port
from orchestrate.engines.swarm.engine import SwarmEngine
from orchestrate.engines.swarm.session import SwarmSession
from orchestrate.errors import EngineError
from orchestrate.files import records
from orchestrate.job import users
from orchestrate.job.gpus import Gpu
from orchestrate.job.plan import Plan
from orchestrate.job.spec import IMAGE, JobSpec
from orchestrate.node import protocol
from orchestrate.node.files import PIECE

MINE = JobSpec(image="mine:1")
OWN = Gpu(id="GPU-1", index=0, name="NVIDIA H200", total=141 << 30, driver="580.95.05")


@pytest.fixture(autouse=True)
def own(monkeypatch):
    """The GPUs of this machine: none, unless a test sets some."""

    def have(*gpus: Gpu, why: str = "this machine has no NVIDIA GPU", useless: str = "") -> None:
        for module in (checks, findings):
            monkeypatch.setattr(module, "look", lambda: gpus)
        monkeypatch.setattr(findings, "why_none", lambda: why)
        monkeypatch.setattr(check_cache, "gpu_problem", lambda ids: useless)

    have()
    return have


class Host:
    """A host whose clock is ahead by some seconds, and which may not receive large packets."""

    def __init__(self, ahead: float, error: Exception | None = None) -> None:
        self.ahead, self.error = ahead, error
        self.got, self.tag, self.closed = b"", "", False

    def reach(self, node: str) -> "Host":
        return self

    def converse(self, request: protocol.Request, *_: object, **__: object) -> Any:
        if isinstance(request, protocol.Upload):
            if self.error:
                raise self.error
            self.got, self.tag = self.got + base64.b64decode(request.data), request.tag
        return message("status", time=time.time() + self.ahead)

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(
    ("ahead", "expected"), [(0.0, ""), (0.8, ""), (-0.8, ""), (1.5, "+1.5 s"), (-3600.0, "-3600.0 s")]
)
def test_a_clock_that_differs_must_be_reported(monkeypatch, ahead, expected):
    monkeypatch.setattr(checks, "send_archive", lambda *_: None)
    there = cast(SwarmSession, Host(ahead))
    found = [finding.what for finding in checks.check_node(there, "master", "host-1", io.BytesIO())]
    assert [text for text in found if "clock" in text] == (
        [f"host-1: its clock differs by {expected}"] if expected else []
    )
    assert found[-1].startswith("host-1: has the image, and a test node on it responds")


@pytest.mark.parametrize("error", [EngineError("not a line of JSON"), ConnectionError("it has gone")])
def test_a_host_that_large_packets_do_not_reach_must_be_reported(error):
    there = Host(0.0, error)
    with tempfile.TemporaryFile() as data:
        (found,) = checks.check_node(cast(SwarmSession, there), "master", "host-1", data)
    assert found.state == checks.BAD and found.what == "host-1: small packets arrive, large ones do not"
    assert "docs/swarm.md" in found.hint and there.closed


def test_a_node_that_does_not_answer_must_be_reported_with_the_ports(monkeypatch):
    silent = Host(0.0)
    monkeypatch.setattr(silent, "reach", lambda node: None)
    (found,) = checks.check_node(cast(SwarmSession, silent), "master", "host-1", io.BytesIO())
    assert found.state == checks.BAD and found.what == "host-1: a test node on it does not respond"
    assert "4789/udp" in found.hint and "7946/udp" in found.hint


class Manager:
    """A Swarm manager with the given hosts."""

    def __init__(self, *hosts: dict) -> None:
        self.known = hosts
        self.host: Callable[[str], str] = str  # the host of a node; Nodes replaces it

    def hosts(self) -> dict[str, dict]:
        return {str(number): host for number, host in enumerate(self.known)}


class Nodes:
    """An engine whose nodes are on the given hosts."""

    def __init__(self, placed: dict[str, str], error: str = "", swarm: Manager | None = None, at: str = "up") -> None:
        self.placed, self.error, self.at, self.manager = placed, error, at, swarm or Manager()
        self.down_after, self.links = 0.0, {host: Host(0.0) for host in placed.values()}
        self.manager.host = lambda node: self.placed[node]

    @property
    def nodes(self) -> dict[str, str]:
        return {node: node for node in self.placed}  # its task

    def reach(self, node: str) -> Host:
        return self.links[self.placed[node]]

    def inventory(self, spec: JobSpec, run: Path, run_image: bool) -> Site:
        assert not run_image
        self.run = run
        self.reached("inventory")
        return HERE

    def open(self, spec: JobSpec, plan: Plan, run: Path, warn: object) -> "Nodes":
        self.spec = spec
        self.reached("open")
        return self

    def up(self, plan: Plan) -> None:
        self.plan, run = plan, self.run
        assert run.is_dir() and plan.placement.code == str(run)  # an empty folder, not the user's code
        # So that `stop` finds what a killed doctor left.
        assert JobState(plan.job_id, "swarm", 1, run, os.getuid()).named
        assert run.stat().st_uid == (os.getuid() or users.without_account()[0]) and self.recorded
        self.reached("up")

    def reached(self, step: str) -> None:
        if self.error and self.at == step:
            raise EngineError(self.error, "look at it")

    @property
    def recorded(self) -> bool:
        return any(self.run.parent.name in path.read_text() for path in next(records.places()).iterdir())

    def down(self, grace: float) -> None:
        self.down_after = grace


def probe(engine: Nodes, spec: JobSpec, hosts: set[str]) -> list[checks.Finding]:
    return [*checks.check_overlay(cast(SwarmEngine, engine), spec, hosts)]


def check_swarm(engine: Nodes) -> list[checks.Finding]:
    return [*checks.check_swarm(cast(SwarmEngine, engine), MINE)]


def test_each_host_must_be_tested_with_a_node_that_is_then_removed():
    engine = Nodes({"master": "host-2", "trainer-1": "host-1"})
    found = probe(engine, JobSpec(image="mine:1", trainers=7), {"host-1", "host-2", "host-3"})
    assert [(one.state, one.what.partition(":")[0]) for one in found] == [
        (checks.GOOD, "host-1"),
        (checks.GOOD, "host-2"),
        (checks.WARNING, "host-3"),  # Swarm placed no node there
    ]
    assert engine.plan.nodes == ("master", "trainer-1", "trainer-2") and engine.plan.gpus == ()
    assert (engine.spec.image, engine.spec.warm, engine.spec.grace) == ("mine:1", False, 1.0)
    assert engine.down_after > 0 and not engine.run.exists() and not engine.recorded
    for there in engine.links.values():
        assert there.closed and len(there.got) > PIECE and there.tag == hashlib.sha256(there.got).hexdigest()
        with tarfile.open(fileobj=io.BytesIO(there.got)) as archive:
            assert archive.getmember("data").size == PIECE


@pytest.mark.parametrize("at", ["inventory", "open", "up"])
def test_nodes_that_do_not_start_must_also_be_removed(at):
    engine = Nodes({"master": "host-1"}, "no image mine:1", at=at)
    with pytest.raises(EngineError, match="no image"):
        probe(engine, JobSpec(), {"host-1"})
    assert (engine.down_after > 0) is (at == "up") and not engine.run.exists() and not engine.recorded


def host(port: int, **status: str) -> dict:
    """A host as Swarm describes it, with this machine's address."""
    description = {"Hostname": "host-1", "Engine": {"EngineVersion": status.pop("version", "28.0.1")}, "Resources": {}}
    description["Hostname"] = status.pop("name", "host-1")
    spec = {"Availability": status.pop("availability", "active")}
    return {"Description": description, "Status": {"Addr": "127.0.0.1", "State": "ready", **status}, "Spec": spec}


@pytest.fixture
def port(monkeypatch):
    """An open port that stands in for all of Swarm's ports."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        number = server.getsockname()[1]
        monkeypatch.setattr(checks, "SWARM_PORTS", (number, number))
        yield number


def test_a_healthy_host_must_be_reported_as_ok(port):
    (found,) = checks.check_host(host(port))
    assert (found.state, found.what) == (checks.GOOD, "host-1 (127.0.0.1): engine 28.0.1, 0 GPUs offered")


@pytest.mark.parametrize(
    ("status", "state", "expected"),
    [
        ({"State": "down"}, checks.WARNING, "accepts no nodes: down, active; docker node inspect host-1"),
        ({"availability": "drain"}, checks.WARNING, "accepts no nodes: ready, drain"),
        ({"version": "18.9.1"}, checks.BAD, "engine 18.9.1 is older than 20.10; update Docker on it"),
        ({"version": "20.9.0"}, checks.BAD, "engine 20.9.0 is older than 20.10"),
        ({"version": "20.10.0"}, checks.GOOD, "engine 20.10.0"),
        ({"version": "100.0.0-rc.1"}, checks.GOOD, "engine 100.0.0-rc.1"),
    ],
)
def test_the_state_and_engine_version_of_a_host_must_be_checked(port, status, state, expected):
    found = [*checks.check_host(host(port, **status))][-1]
    assert found.state == state and expected in f"{found.what}; {found.hint}"


def test_a_closed_port_must_be_reported(port, monkeypatch):
    monkeypatch.setattr(checks, "SWARM_PORTS", (port, free_port()))
    found = [*checks.check_host(host(port))][-1]
    assert found.state == checks.BAD and found.what.endswith(f"does not respond on {checks.SWARM_PORTS[1]}/tcp")


@pytest.mark.timeout(20)
def test_a_port_whose_packets_are_dropped_must_be_reported_before_the_kernel_gives_up(monkeypatch):
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        monkeypatch.setattr(checks, "SWARM_PORTS", (0, full.getsockname()[1]))
        monkeypatch.setattr(checks, "CONNECT_TIMEOUT", 0.02)
        with socket.create_connection(full.getsockname()):
            assert [found.state for found in checks.check_host(host(0))] == [checks.GOOD, checks.BAD]


def test_only_a_manager_must_answer_at_the_manager_port(port, monkeypatch):
    monkeypatch.setattr(checks, "SWARM_PORTS", (free_port(), port))
    assert [found.state for found in checks.check_host(host(port))] == [checks.GOOD]
    found = [*checks.check_host(host(port) | {"ManagerStatus": {"Leader": True}})]
    assert [one.state for one in found] == [checks.GOOD, checks.BAD]
    assert f"on {checks.SWARM_PORTS[0]}/tcp" in found[1].what


def test_the_gpus_of_a_host_must_be_counted(port):
    there = host(port)
    there["Description"]["Resources"] = {
        "GenericResources": [{"NamedResourceSpec": {"Kind": "NVIDIA-GPU", "Value": f"GPU-{i}"}} for i in range(2)]
    }
    (found,) = checks.check_host(there)
    assert found.what.endswith("2 GPUs offered")


def test_only_hosts_that_accept_nodes_must_be_tested(port):
    hosts = host(port, name="host-2"), host(port, name="host-1"), host(port, name="host-3", availability="drain")
    engine = Nodes({"master": "host-1", "trainer-1": "host-2"}, swarm=Manager(*hosts))
    found = [(one.state, one.what.replace("(", ":").split(":")[0].strip()) for one in check_swarm(engine)]
    assert found == [
        (checks.GOOD, "host-1"),
        (checks.GOOD, "host-2"),
        (checks.WARNING, "host-3"),
        (checks.GOOD, "host-1"),
        (checks.GOOD, "host-2"),
    ]
    assert engine.plan.nodes == ("master", "trainer-1") and engine.spec.image == "mine:1"


def test_different_engine_versions_must_be_reported_once(port):
    hosts = host(port), host(port, name="host-2", version="27.0.0"), host(port, name="host-3")
    engine = Nodes({"master": "host-1", "trainer-1": "host-2", "trainer-2": "host-3"}, swarm=Manager(*hosts))
    (difference,) = [one for one in check_swarm(engine) if one.state != checks.GOOD]
    assert (
        difference.state == checks.WARNING and difference.what == "engine versions differ between hosts: 27.0.0, 28.0.1"
    )


def test_a_failure_to_start_nodes_must_be_reported(port):
    engine = Nodes({"master": "host-1"}, "no overlay", swarm=Manager(host(port)))
    assert check_swarm(engine)[-1] == checks.Finding(checks.BAD, "no overlay", "look at it")


# --- the local engine


class Engine:
    """A Docker Engine with the given facts."""

    host = "unix:///var/run/docker.sock"

    def __init__(self, **info: object) -> None:
        self.info = {"ServerVersion": "28.0.1", **info}


@pytest.fixture
def found(monkeypatch):
    """A function that runs `doctor` on an engine with the given facts; returns its output lines and exit code."""

    def look(capsys, image=True, swarm: object = None, spec=MINE, **info: object) -> tuple[list[str], int]:
        monkeypatch.setattr(checks, "Daemon", lambda: Engine(**info))
        monkeypatch.setattr(checks, "has_image", lambda daemon, name: image)
        monkeypatch.setattr(checks, "SwarmEngine", swarm)
        code = examine(spec)
        return capsys.readouterr().out.splitlines(), code

    return look


def test_a_healthy_engine_must_be_reported_as_ok(found, capsys):
    lines, code = found(capsys, Runtimes={"nvidia": {}, "runc": {}}, Swarm={"LocalNodeState": "inactive"})
    assert code == 0 and all(line.startswith("ok ") for line in lines) and len(lines) == 5
    assert "28.0.1 at unix:///var/run/docker.sock" in lines[0] and "NVIDIA runtime is installed" in lines[1]
    assert lines[2] == "ok       this machine has no NVIDIA GPU"
    assert "image mine:1 exists" in lines[3] and "not part of a Swarm" in lines[4]


def test_missing_features_of_an_engine_must_be_reported_but_not_as_errors(found, capsys):
    lines, code = found(capsys, image=False, Runtimes={"runc": {}})
    assert code == 0
    assert lines[1] == "ok       no NVIDIA runtime: jobs train on the CPU"
    assert lines[3:5] == [
        "warning  image mine:1 is missing",
        "         hint: the first run builds or pulls it",
    ]
    assert lines[5:7] == [
        f"warning  image {IMAGE} is missing: without it, nodes can reach this machine's ports",
        "         hint: docker compose build",
    ]
    for spec in (JobSpec(), dataclasses.replace(MINE, host_access=True)):  # no other image is needed
        lines, _ = found(capsys, image=False, spec=spec, Runtimes={"runc": {}})
        assert [line for line in lines if "missing" in line] == [f"warning  image {spec.image} is missing"]


def test_an_engine_that_does_not_answer_must_be_an_error(monkeypatch, capsys):
    def refuse() -> None:
        raise EngineError("no Docker Engine answers", "start Docker")

    monkeypatch.setattr(checks, "Daemon", refuse)
    assert examine(JobSpec()) == 3
    *engine, torch, gpus = capsys.readouterr().out.splitlines()
    assert engine == ["error    no Docker Engine answers", "         hint: start Docker"]
    assert torch.startswith("ok       local processes: torch ") and gpus == "ok       this machine has no NVIDIA GPU"


@pytest.mark.parametrize("there", [True, False])
def test_requirements_of_local_processes_must_be_checked_with_engine_process(monkeypatch, capsys, there):
    def version(name: str) -> str:
        if not there:
            raise findings.metadata.PackageNotFoundError
        return f"2.0 of {name}"

    monkeypatch.setattr(findings.metadata, "version", version)
    assert examine(JobSpec(engine="process")) == 0
    python = sys.executable
    assert capsys.readouterr().out.splitlines()[:-1] == (
        [f"ok       local processes: torch 2.0 of torch in {python}"]
        if there
        else [
            f"warning  local processes: torch is not installed in {python}",
            f"         hint: {python} -m pip install torch",
        ]
    )


def test_a_swarm_that_cannot_be_queried_must_be_reported(found, capsys):
    def refuse() -> None:
        raise EngineError("this host is no manager", "ask one")

    lines, code = found(capsys, swarm=refuse, Swarm={"LocalNodeState": "active"})
    assert code == 0 and lines[-2:] == ["warning  this host is no manager", "         hint: ask one"]


def test_a_swarm_must_be_checked_if_there_is_one(found, capsys, port):
    engine = Nodes({"master": "host-1"}, "no overlay", swarm=Manager(host(port)))
    lines, code = found(capsys, swarm=lambda: engine, Swarm={"LocalNodeState": "active"})
    assert code == 4
    assert lines[-2:] == ["error    no overlay", "         hint: look at it"]


def test_the_gpus_of_this_machine_must_be_listed_with_their_problems(own, capsys):
    idle = dataclasses.replace(OWN, id="GPU-2", used=100 << 30, persistent=False)
    own(OWN, idle, useless="torch 2.15.0: The NVIDIA driver on your system is too old")
    assert examine(JobSpec(engine="process")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:3] == [
        "ok       GPU-1: NVIDIA H200, 141 GiB, driver 580.95.05",
        "ok       GPU-2, 71% of its memory in use: NVIDIA H200, 141 GiB, driver 580.95.05",
    ]
    assert lines[3].startswith("warning  persistence mode is off") and "nvidia-smi -pm 1" in lines[4]
    assert lines[5].startswith("warning  local processes cannot use the GPUs: torch 2.15.0: The NVIDIA driver")
    own(dataclasses.replace(idle, used=0, total=0, driver="", display=True))  # whose driver the display keeps loaded
    examine(JobSpec(engine="process"))
    assert capsys.readouterr().out.splitlines()[1:] == ["ok       GPU-2: NVIDIA H200"]


def test_a_driver_library_mismatch_must_be_a_warning(own, capsys):
    own(why="nvidia-smi: Failed to initialize NVML: Driver/library version mismatch")
    examine(JobSpec(engine="process"))
    expected = "\nwarning  nvidia-smi: Failed to initialize NVML: Driver/library version mismatch\n"
    assert capsys.readouterr().out.endswith(expected)


def test_gpus_that_containers_cannot_use_must_be_a_warning_that_names_the_toolkit(own, found, capsys):
    own(OWN)
    lines, code = found(capsys, Runtimes={"runc": {}})
    assert code == 0 and lines[1] == "warning  no NVIDIA runtime: jobs train on the CPU"
    assert "container toolkit" in lines[2] and lines[3].startswith("ok       GPU-1: ")
    lines, _ = found(capsys, Runtimes={"runc": {}}, CDISpecDirs=["/etc/cdi"], ServerVersion="27.5.1")
    assert lines[1] == "ok       GPUs are available to containers as CDI devices (nvidia.com/gpu)"
