"""A session must start missing nodes, replace lost ones, and stop waiting in time; with a fake Swarm."""

import pytest
from support.manager_stub import StubManager
from support.swarm_nodes import down, job, state

from orchestrate.engines.swarm import session as swarm
from orchestrate.errors import EngineError


def counts(stub: StubManager) -> dict[str, int]:
    return {one["Spec"]["Name"]: one["Spec"]["Mode"]["Replicated"]["Replicas"] for one in stub.services}


def test_only_missing_nodes_must_be_started(engine, stub, tmp_path):
    engine.up(job())
    assert counts(stub) == {"j-trainer": 2, "j-master": 1} and stub.containers
    state(stub, "trainer-1", "failed")
    engine.up(job())
    assert counts(stub) == {"j-trainer": 3, "j-master": 1}
    assert {*engine.alive()} == {"master", "trainer-2", "trainer-3"}
    stub.task("master")["DesiredState"] = "shutdown"
    stub.placed = lambda task: task.update(Slot=1)  # a service with one replica reuses the name of its task
    engine.up(job())
    assert counts(stub) == {"j-trainer": 3, "j-master": 2}


def test_a_discarded_node_must_be_replaced(engine, stub, tmp_path):
    engine.up(job())
    engine.discard(["trainer-1"])
    assert {*engine.alive()} == {"master", "trainer-2"}
    engine.up(job())
    assert {*engine.alive()} == {"master", "trainer-2", "trainer-3"}


def test_a_starting_node_must_be_awaited_and_not_started_twice(engine, stub, tmp_path, clock, monkeypatch):
    monkeypatch.setattr(swarm, "START_TIMEOUT", 0.3)
    state(stub, "trainer-1", "preparing")
    began, sleep = clock.now, clock.sleep

    def sleep_and_start(seconds: float) -> None:
        sleep(seconds)
        if clock.now > began + 0.6:  # imitates pulling an image
            state(stub, "trainer-1", "running")

    clock.sleep = sleep_and_start
    engine.up(job())
    assert counts(stub) == {"j-trainer": 2, "j-master": 1}
    assert {*engine.alive()} == {"master", "trainer-1", "trainer-2"}


@pytest.mark.parametrize(("task_state", "seconds"), [("starting", 0.4), ("preparing", 0.8)])
def test_waiting_for_a_node_that_does_not_start_must_time_out(
    engine, stub, tmp_path, clock, monkeypatch, task_state, seconds
):
    monkeypatch.setattr(swarm, "START_TIMEOUT", 0.4)
    monkeypatch.setattr(swarm, "PULL_TIMEOUT", 0.8)
    state(stub, "trainer-1", task_state)
    began = clock.now
    with pytest.raises(EngineError, match="1 of 3 nodes did not start"):
        engine.up(job())
    assert seconds <= clock.now - began < seconds + 0.3


def test_a_task_that_no_host_accepts_must_be_reported_soon_unless_it_ended_earlier(
    engine, stub, tmp_path, clock, monkeypatch
):
    monkeypatch.setattr(swarm, "PENDING_TIMEOUT", 0.5)
    stub.task("trainer-1")["Status"] = {"State": "rejected", "Err": "No such image: x"}
    began = clock.now
    engine.up(job())  # ignores that task
    assert clock.now < began + 0.2
    stub.placed = lambda task: task.update(Status={"State": "pending", "Err": "no suitable node (too small)"})
    engine.discard(["trainer-2"])
    with pytest.raises(EngineError, match="no suitable host for a node: too small") as raised:
        engine.up(job())
    assert 0.5 < clock.now - began < 0.9 and raised.value.hint


@pytest.mark.parametrize("how", ["shutdown", "host down"])
def test_a_node_that_is_lost_while_others_start_must_be_replaced_however_late(engine, stub, clock, monkeypatch, how):
    monkeypatch.setattr(swarm, "PENDING_TIMEOUT", 0.5)
    stub.state, began, sleep = "preparing", clock.now, clock.sleep
    engine.discard(["trainer-2"])

    def sleep_and_lose(seconds: float) -> None:
        sleep(seconds)
        if clock.now < began + 0.6 or stub.state == "running":
            return
        stub.state = "running"
        if how == "host down":
            down(stub, 2)
        else:
            state(stub, "trainer-3", how)

    clock.sleep = sleep_and_lose
    engine.up(job())
    assert counts(stub)["j-trainer"] == 4 and "trainer-4" in engine.alive()


def test_a_node_that_ends_at_once_must_be_reported_soon_with_its_host(engine, stub, clock, monkeypatch):
    monkeypatch.setattr(swarm, "PENDING_TIMEOUT", 0.5)
    stub.placed = lambda task: task.update(Status={"State": "failed", "Err": "task: non-zero exit (1)"})
    engine.discard(["trainer-2"])
    began = clock.now
    with pytest.raises(EngineError, match=r"host-\d: task: non-zero exit \(1\)"):
        engine.up(job())
    assert 0.5 < clock.now - began < 5


def test_a_host_that_rejects_a_node_as_soon_as_it_is_placed_must_be_reported_at_once(engine, stub, clock):
    stub.placed = lambda task: task.update(Status={"State": "rejected", "Err": "No such image: x"})
    engine.discard(["trainer-2"])
    began = clock.now
    with pytest.raises(EngineError, match="has no image"):
        engine.up(job())
    assert clock.now < began + 0.5


def test_the_nodes_of_a_lost_host_must_be_replaced(engine, stub, tmp_path):
    down(stub, 2)  # the host of trainer-2
    engine.up(job())
    assert {*engine.alive()} == {"master", "trainer-1", "trainer-3"}
