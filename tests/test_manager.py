"""What a Swarm is asked for and how long it is waited for, on the manager's side, without a Swarm."""

import os
import time
from types import SimpleNamespace

import pytest
from conftest import docker
from scripted import Clock
from test_plan import HERE, plan

from orchestrate.engines import manager, swarm
from orchestrate.engines.daemon import Daemon
from orchestrate.engines.links import Linked
from orchestrate.engines.manager import Manager, shared_out
from orchestrate.engines.swarm import SwarmEngine
from orchestrate.errors import EngineError
from orchestrate.node.lease import LEASE
from orchestrate.spec import JobSpec


@pytest.mark.parametrize(
    ("offered", "nodes", "spares", "used"),
    [
        ([4, 4], 2, 0, 8),
        ([4, 4], 2, 2, 4),  # two each, so that the spare nodes find as many
        ([4, 4], 3, 0, 6),
        ([4, 4], 3, 1, 6),
        ([2, 2, 2], 3, 3, 3),
        ([8, 1], 2, 0, 8),
        ([1, 1], 3, 0, 2),  # too few, which the plan refuses
        ([0, 0], 2, 0, 0),
        ([], 2, 0, 0),
    ],
)
def test_nodes_must_have_as_many_gpus_each_as_leave_some_for_the_spare_ones(offered, nodes, spares, used):
    assert shared_out(offered, nodes, spares) == used


def test_the_workers_of_a_node_that_is_silent_must_be_waited_for_until_its_lease_is_over():
    engine = SwarmEngine.__new__(SwarmEngine)  # without a Swarm
    Linked.__init__(engine)
    engine.nodes, engine.lost, engine.unsure = {"trainer-1": {"ID": "task"}}, {}, {}
    heard = time.monotonic() - 3
    engine.said, engine.running = {"trainer-1": heard}, {1: "trainer-1"}
    engine._end([1])
    assert engine.unsure["task"] > heard + LEASE


@pytest.fixture
def clock(monkeypatch):
    """Time that passes only while something waits."""
    made = Clock()
    for module in (manager, swarm):
        monkeypatch.setattr(module, "time", made)
    return made


def test_a_request_to_stop_must_end_the_wait_for_nodes_that_do_not_start(clock, tmp_path):
    engine = SwarmEngine.__new__(SwarmEngine)  # without a Swarm
    Linked.__init__(engine)
    engine.nodes, began = {}, clock.now
    engine._settle, engine._well_nodes = lambda *_: None, dict
    nothing = {"tasks": list, "scale": lambda *_: None, "connect": lambda _: None, "refusal": lambda *_, **__: None}
    engine.swarm = SimpleNamespace(**nothing)
    with pytest.raises(EngineError, match="3 of 3 nodes did not start"):
        engine.up(JobSpec(trainers=2), plan(JobSpec(trainers=2), HERE, "j"), tmp_path, lambda: clock.now > began + 5)
    assert clock.now < began + 6


def test_what_is_on_a_host_that_is_down_must_not_be_waited_for(clock, tmp_path, monkeypatch):
    made, began = Manager.__new__(Manager), clock.now
    made.home, made.run = "j", tmp_path
    made.known = {"h": {"ID": "h", "Status": {"State": "down"}, "Description": {"Hostname": "host-3"}}}
    task = {"Name": "trainer-1", "NodeID": "h", "Status": {"State": "running"}}
    found = {"jobs": list, "things": lambda _: [], "tasks": lambda: [task], "hosts": dict}
    for name, answer in found.items():
        monkeypatch.setattr(made, name, answer)
    with pytest.raises(EngineError, match="1 node on host-3, which is down"):
        made.remove("j", 30.0)
    assert clock.now == began


@pytest.mark.docker
def test_of_networks_the_one_of_the_very_name_must_be_taken(docker_engine, tmp_path):
    name = f"a-host-{tmp_path.name}-{os.getpid()}"
    docker("network", "create", name)
    try:
        assert [network.name for network in Daemon().networks("host")] == ["host"]
    finally:
        docker("network", "rm", name)
