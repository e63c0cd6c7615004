"""What `doctor` finds on hosts; see test_swarm.py for real ones, which have the same clock."""

import io
import socket
import time

import pytest

from orchestrate import doctor
from orchestrate.engines.ports import free_port


class Host:
    """A host whose clock differs by some seconds."""

    def __init__(self, ahead: float) -> None:
        self.ahead = ahead

    def reach(self, node: str) -> "Host":
        return self

    def converse(self, ask: str, **facts: object) -> dict[str, float]:
        return {"time": time.time() + self.ahead}

    def close(self) -> None:
        pass


@pytest.mark.parametrize(("ahead", "told"), [(0.0, ""), (3600.0, "+3600.0 s"), (-3600.0, "-3600.0 s")])
def test_a_clock_that_differs_must_be_told(monkeypatch, ahead, told):
    monkeypatch.setattr(doctor, "give", lambda *_: None)
    found = [finding.what for finding in doctor._ask(Host(ahead), "master", "host-1", io.BytesIO())]
    assert [text for text in found if "clock" in text] == ([f"host-1: its clock differs by {told}"] if told else [])


def host(port: int, **status: str) -> dict:
    """A host as Swarm describes it, whose ports are one of this machine's."""
    description = {"Hostname": "host-1", "Engine": {"EngineVersion": status.pop("version", "28.0.1")}, "Resources": {}}
    spec = {"Availability": status.pop("availability", "active")}
    return {"Description": description, "Status": {"Addr": "127.0.0.1", "State": "ready", **status}, "Spec": spec}


@pytest.fixture
def port(monkeypatch):
    """One that answers, in the place of all of Swarm's."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        number = server.getsockname()[1]
        monkeypatch.setattr(doctor, "SWARM_PORTS", (number, number))
        yield number


def test_a_host_that_is_well_must_be_called_so(port):
    (found,) = doctor._host(host(port))
    assert (found.state, found.what) == (doctor.GOOD, "host-1 (127.0.0.1): engine 28.0.1, 0 GPUs offered")


@pytest.mark.parametrize(
    ("status", "state", "told"),
    [
        ({"State": "down"}, doctor.WARNING, "takes no nodes: down, active"),
        ({"availability": "drain"}, doctor.WARNING, "takes no nodes: ready, drain"),
        ({"version": "18.9.1"}, doctor.BAD, "engine 18.9.1 is older than"),
    ],
)
def test_what_keeps_nodes_from_a_host_must_be_told(port, status, state, told):
    found = [*doctor._host(host(port, **status))][-1]
    assert found.state == state and told in found.what


def test_a_port_that_is_closed_must_be_told(port, monkeypatch):
    monkeypatch.setattr(doctor, "SWARM_PORTS", (port, free_port()))
    found = [*doctor._host(host(port))][-1]
    assert found.state == doctor.BAD and found.what.endswith(f"does not answer at {doctor.SWARM_PORTS[1]}/tcp")
