"""Findings of `doctor` on fake hosts; see tests/e2e/swarm for real ones, whose clocks cannot differ."""

import base64
import hashlib
import io
import os
import socket
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from support.messages import message
from support.plans import HERE, Site
from support.ports import free_port

from orchestrate.doctor import checks
from orchestrate.engines.base import JobState
from orchestrate.engines.swarm.engine import SwarmEngine
from orchestrate.engines.swarm.session import SwarmSession
from orchestrate.errors import EngineError
from orchestrate.host import records, users
from orchestrate.node.files import PIECE
from orchestrate.node.messages import protocol
from orchestrate.plan.plan import Plan
from orchestrate.spec.spec import JobSpec

MINE = JobSpec(image="mine:1")


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
        files = filter(Path.is_file, next(records.places()).iterdir())
        return any(self.run.parent.name in path.read_text() for path in files)

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


def test_a_swarm_must_be_checked_if_there_is_one(found, capsys, port):
    engine = Nodes({"master": "host-1"}, "no overlay", swarm=Manager(host(port)))
    lines, code = found(capsys, swarm=lambda: engine, Swarm={"LocalNodeState": "active"})
    assert code == 4
    assert lines[-2:] == ["error    no overlay", "         hint: look at it"]
