"""How the Swarm engine detects lost nodes, and how it ends nodes, with a fake Swarm, fake nodes and a fake clock."""

import os
import threading

import pytest
from support.messages import encoded
from support.scripted import Clock
from support.swarm_nodes import FakeSession, connected, down, job, state, sync

from orchestrate.engines.base import Observed
from orchestrate.engines.swarm import session as swarm
from orchestrate.errors import EngineError
from orchestrate.node.lease import LEASE_TIMEOUT
from orchestrate.record.outcomes import WorkerExit


@pytest.mark.parametrize("how", ["ended", "host down"])
def test_the_connection_to_a_node_that_swarm_reports_as_lost_must_be_closed(engine, stub, clock, how):
    connected(engine, "master", "trainer-1", "trainer-2")
    if how == "ended":
        state(stub, "trainer-1", "failed")
    else:
        down(stub, 1)  # the master's host, too
    clock.now += swarm.LIST_INTERVAL + 0.1
    assert not engine.wait(0).exits
    lost = {"trainer-1"} | ({"master"} if how == "host down" else set())
    assert (
        engine.clients.broken == lost and set(engine.clients.connections) == {"master", "trainer-1", "trainer-2"} - lost
    )
    assert {end.rank for end in engine.wait(0).exits} == ({0, 1} if how == "host down" else {1})


def test_nodes_must_be_asked_for_a_status_every_other_second(engine, clock):
    connected(engine, "master", "trainer-1", "trainer-2")
    clock.now += swarm.LIST_INTERVAL + 0.1
    engine.wait(0)
    engine.wait(0)
    assert [end.heard() for end in engine.ends.values()] == [[{"ask": "status"}]] * 3
    clock.now += swarm.LIST_INTERVAL + 0.1
    engine.wait(0)
    assert engine.ends["master"].heard() == [{"ask": "status"}]


def silence(engine: FakeSession, clock: Clock, seconds: float) -> list[Observed]:
    """Let time pass while only the master answers; return what was seen."""
    seen = []
    for _ in range(round(seconds)):
        clock.now += 1.0
        engine.ends["master"].send(encoded("status"))
        seen.append(engine.wait(0.01))
    return seen


def test_a_node_that_does_not_answer_must_count_as_silent_and_then_as_lost(engine, clock):
    connected(engine, "master", "trainer-1", "trainer-2")
    silence(engine, clock, swarm.SILENT_AFTER)
    assert not engine.wait(0).troubles
    silence(engine, clock, 3)
    assert engine.wait(0).troubles == {"trainer-1": "silent", "trainer-2": "silent"}
    assert set(engine.clients.connections) == {"master", "trainer-1", "trainer-2"}
    for node in ("trainer-1", "trainer-2"):
        engine.ends[node].send(encoded("status"))
    engine.wait(0.01)
    assert not engine.wait(0).troubles
    del engine.clients.running[2]  # its worker has ended meanwhile
    silence(engine, clock, swarm.SILENT_AFTER + 3)
    assert engine.wait(0).troubles == {"trainer-1": "silent"}
    engine.sync = given_up = sync()
    seen = silence(engine, clock, swarm.HOST_DOWN_TIMEOUT - swarm.SILENT_AFTER)
    assert all(each.troubles == {"trainer-1": "silent"} for each in seen)  # it has not recovered before it is lost
    assert engine.wait(0).exits
    assert given_up.calls.count("give_up") == 2
    assert (
        engine.abandoned == {"t0", "t1"}
        and set(engine.clients.connections) == {"master"}
        and not engine.wait(0).troubles
    )
    began = clock.now
    assert engine.explain(WorkerExit(1, 137), "trainer-1") == "host lost" and clock.now == began


def test_a_node_that_falls_silent_after_another_one_must_be_detected_too(engine, clock):
    connected(engine, "master", "trainer-1", "trainer-2")
    for _ in range(10):
        engine.ends["trainer-2"].send(encoded("status"))
        silence(engine, clock, 1)
    assert engine.wait(0).troubles == {"trainer-1": "silent"}
    silence(engine, clock, 9)
    assert engine.wait(0).troubles == {"trainer-1": "silent", "trainer-2": "silent"}


def test_a_worker_whose_node_was_never_reached_must_be_detected_as_lost(engine, stub, clock):
    connected(engine, "master", "trainer-1")
    state(stub, "trainer-2", "failed")
    clock.now += swarm.LIST_INTERVAL + 0.1
    engine.wait(0)
    assert [end.rank for end in engine.wait(0).exits] == [2]


@pytest.mark.parametrize(
    ("sign", "code", "cause"),
    [
        ("oom", 137, "out of memory"),
        ("oom", 1, "out of memory in a child"),
        ("cut off", 137, "host lost"),
        ("ending", 143, "node stopped"),
        ("", 1, None),
    ],
)
def test_the_hint_of_a_workers_node_must_take_precedence(engine, stub, sign, code, cause):
    engine.clients.exit_hints[1] = sign
    state(stub, "trainer-1", "failed")
    assert engine.explain(WorkerExit(1, code), "trainer-1") == cause


def test_the_cause_of_a_workers_end_must_follow_from_swarms_state_of_its_node(engine, stub, clock, monkeypatch):
    monkeypatch.setattr(swarm, "HOST_DOWN_TIMEOUT", 1.0)
    connected(engine, "master")
    began = clock.now
    assert engine.explain(WorkerExit(0, 137), "master") is None and clock.now == began  # its node can be reached
    assert engine.explain(WorkerExit(1, 137), "trainer-1") == "host lost"  # Swarm reports its node as running
    assert swarm.HOST_DOWN_TIMEOUT < clock.now - began < swarm.HOST_DOWN_TIMEOUT + 1
    state(stub, "trainer-1", "failed")
    assert engine.explain(WorkerExit(1, 137), "trainer-1") == "node lost"
    assert engine.explain(WorkerExit(3, 137), "trainer-3") == "node lost"  # no longer known to Swarm
    down(stub, 1)
    assert engine.explain(WorkerExit(1, 137), "trainer-1") == "host lost"
    down(stub, 1, "ready")  # the host is up again, and has ended the node itself
    assert engine.explain(WorkerExit(1, 137), "trainer-1") == "host lost"


def test_a_lost_host_must_be_reported_as_soon_as_swarm_detects_it(engine, stub, clock):
    began, sleep = clock.now, clock.sleep
    clock.sleep = lambda seconds: (sleep(seconds), clock.now > began + 1 and down(stub, 1))
    assert engine.explain(WorkerExit(1, 137), "trainer-1") == "host lost"
    assert clock.now < began + 2


def test_all_files_must_be_copied_before_nodes_are_removed(engine, stub, monkeypatch):
    monkeypatch.setattr(swarm, "NODE_END_TIMEOUT", 0.1)
    connected(engine, "master", "trainer-1", "trainer-2")
    engine.sync = fake = sync(copy_all=EngineError("1 file could not be copied"))
    with pytest.raises(EngineError, match="could not be copied"):
        engine.down(0.1)
    assert len(stub.services) == 2 and engine.sync is fake  # so that `stop` finds them
    engine.sync, engine.copied = sync(silent={"trainer-1"}), {"trainer-1": "t0"}
    with pytest.raises(EngineError, match="files of trainer-1 could not be copied") as raised:
        engine.down(0.1)
    assert "7946" in raised.value.hint and stub.services
    state(stub, "trainer-1", "failed")  # its files are lost
    engine.sync = fake = sync(silent={"trainer-1"})
    engine.down(0.1)
    assert not stub.services and fake.calls[-1] == "close" and engine.sync is None
    assert engine.warned == ["the last files of trainer-1 may be missing: it ended before they were copied"]


def test_the_wait_for_files_at_the_end_must_be_interruptible(engine):
    connected(engine, "master")
    engine.sync, interrupted = sync(), []
    engine.sync.copy_all = lambda timeout, stopped: interrupted.append(stopped())
    engine.down(0.1, lambda: True)
    assert interrupted == [True]


def test_files_that_stay_on_their_nodes_must_be_reported_before_and_after_the_end(engine):
    connected(engine, "master")
    engine.sync = sync(warnings=["some files are not copied"])
    engine.wait(0)
    assert engine.warned == ["some files are not copied"]
    engine.down(0)
    assert engine.warned == ["some files are not copied"] * 2


def test_an_immediate_end_must_wait_a_few_seconds_for_files_and_keep_nodes_that_have_more(engine, stub):
    connected(engine, "master")
    engine.sync = sync(copy_all=EngineError("not all files were copied from the nodes within 5 s"))
    services = [*stub.services]
    with pytest.raises(EngineError, match="not all files were copied"):
        engine.down(0, lambda: True)
    assert services and [*stub.services] == services
    engine.sync, waits = sync(), []
    engine.sync.copy_all = lambda timeout, stopped: waits.append((timeout, stopped()))
    engine.down(0, lambda: True)
    assert waits == [(swarm.HURRIED_SYNC_TIMEOUT, False)] and not stub.services


def test_files_of_nodes_that_have_ended_must_not_be_waited_for(engine, stub):
    for node in ("master", "trainer-1", "trainer-2"):
        state(stub, node, "failed")
    engine.sync = fake = sync(copy_all=EngineError("not all files came home"))
    engine.down(0.1)
    assert "copy_all" not in fake.calls and fake.calls[-1] == "close" and not stub.services


def test_nodes_that_count_as_lost_must_be_kept_while_they_run_and_have_files(engine, stub):
    engine.discard(["master", "trainer-1", "trainer-2"])
    assert not engine.alive() and engine.connect("trainer-1") is None
    engine.sync, engine.copied = fake, _ = sync(silent={"trainer-1"}), {"trainer-1": "t0"}
    with pytest.raises(EngineError, match="files of trainer-1 could not be copied"):
        engine.down(0.1)
    assert "copy_all" in fake.calls and stub.services


def test_nodes_must_end_before_swarm_removes_them_within_a_time_limit(engine, stub, clock, monkeypatch):
    monkeypatch.setattr(swarm, "NODE_END_TIMEOUT", 0.5)
    connected(engine, "master", "trainer-1", "trainer-2")
    began = clock.now
    engine.down(0.5)
    assert 1.0 <= clock.now - began < 1.5
    assert {"ask": "end"} in engine.ends["master"].heard()
    assert not engine.clients.connections and not stub.services


def test_nodes_that_have_ended_must_not_be_waited_for(engine, stub, clock):
    connected(engine, "master", "trainer-1", "trainer-2")
    for task in stub.tasks:
        task["Status"]["State"] = "complete"
    began = clock.now
    engine.down(30.0)
    assert clock.now < began + 1


def test_a_generation_that_starts_without_the_last_files_of_a_node_must_say_so(engine, stub):
    state(stub, "trainer-2", "failed")  # the failure names it already
    engine.sync, engine.copied = sync(silent={"trainer-1", "trainer-2"}), {"trainer-1": "t0", "trainer-2": "t1"}
    engine.gather(lambda: True)  # interrupted: it was not asked yet
    assert not engine.warned
    engine.sync = sync(silent={"trainer-1", "trainer-2"}, catch_up=True)
    engine.gather(lambda: False)
    assert engine.warned == ["the next generation starts without the last files of trainer-1, which does not respond"]


def test_a_full_disk_must_be_reported_before_the_next_generation(engine):
    engine.gather(lambda: False)  # without a sync, it does nothing
    engine.sync = fake = sync(lacks_space=OSError(os.strerror(28)))
    with pytest.raises(OSError, match="No space left"):
        engine.gather(lambda: False)
    assert fake.calls == ["catch_up", "lacks_space"]
    why = "1 file could not be copied, such as 'a': it is a folder here"
    engine.sync = sync(catch_up=True, failed=why)
    engine.gather(lambda: False)
    (warning,) = engine.warned
    assert warning.endswith(
        "without the last files of this one: 1 file could not be copied, such as 'a': it is a folder here"
    )


def test_the_last_lines_of_workers_must_be_copied_before_their_exits_are_reported(engine):
    connected(engine, "master", "trainer-1", "trainer-2")
    engine.sync = fake = sync()
    for rank, node in enumerate(("master", "trainer-1", "trainer-2")):
        engine.ends[node].send(encoded("ended", generation=-1, rank=rank))
        assert [end.rank for end in engine.wait(1).exits] == [rank]
        assert ("catch_up" in fake.calls) == (rank == 2)


@pytest.mark.parametrize("trouble", ["", "host down", "no task", "no log", "slow"])
def test_the_last_lines_of_a_lost_worker_must_be_added_to_its_log_if_available(
    engine, stub, tmp_path, monkeypatch, trouble
):
    (tmp_path / "logs").mkdir()
    log = tmp_path / "logs" / "rank-1.log"
    start = b"line\n" * 14_000 + b"one\n" + b"line\n" * 9
    if trouble != "no log":
        log.write_bytes(start + b"first\n")
    lines, more = [*[b"line"] * 99, b"one", *[b"line"] * 9, b"first"], [b"second", *[b"line"] * 9, b"first"]
    copy = b"".join(b"[rank 1] " + line + b"\n" for line in lines + more)
    engine.swarm.output = lambda task: {"t0": copy}[task["ID"]]
    if trouble == "host down":
        down(stub, 1)
    if trouble == "slow":
        monkeypatch.setattr(swarm, "LOG_TIMEOUT", 0)
        submit = engine.pool.submit
        gate = threading.Event()
        engine.pool.submit = lambda *arguments: submit(gate.wait)
    engine.lost = {1: "trainer-1" if trouble != "no task" else "trainer-9"}
    engine._complete_logs()
    if trouble == "slow":
        gate.set()
    assert not engine.lost
    if trouble != "no log":
        assert log.read_bytes() == start + b"first\n" + b"second\n" * (not trouble) + (start[-45:] + b"first\n") * (
            not trouble
        )


def test_the_log_of_a_lost_task_must_be_asked_for_once_swarm_reports_its_end(engine, stub, clock, tmp_path):
    (tmp_path / "logs").mkdir()
    log = tmp_path / "logs" / "rank-1.log"
    log.write_bytes(b"first\n")
    began = clock.now

    def output(task) -> bytes:
        seconds.append(clock.now - began)
        return b"[rank 1] first\n[rank 1] second\n"

    def later(seconds: float, sleep=clock.sleep) -> None:
        sleep(seconds)
        if clock.now > began + 1:
            stub.tasks[0]["Status"]["State"] = "failed"

    seconds: list[float] = []
    engine.swarm.output, clock.sleep, engine.lost = output, later, {1: "trainer-1"}
    engine._complete_logs()
    assert log.read_bytes() == b"first\nsecond\n" and 1.0 <= seconds[0] < 1.5


def test_the_workers_of_a_silent_node_must_be_waited_for_until_its_lease_expires(engine, clock):
    connected(engine, "trainer-1")
    engine.last_heard["trainer-1"] = heard = clock.now - 3
    engine.clients.mark_lost([1])
    assert engine.lease_ends["t0"] > heard + LEASE_TIMEOUT


def test_a_request_to_stop_must_end_the_wait_for_nodes_that_do_not_start(engine, stub, clock):
    began, stub.placed = clock.now, lambda task: task["Status"].update(State="preparing")
    for task in stub.tasks:
        task["Status"]["State"] = "failed"
    with pytest.raises(EngineError, match="3 of 3 nodes did not start"):
        engine.up(job(), lambda: clock.now > began + 5)
    assert clock.now < began + 6


def test_what_a_job_has_left_running_must_be_killed_before_its_last_files_are_copied(engine):
    connected(engine, "master", "trainer-1", "trainer-2")
    engine.sync = sync(copy_all=EngineError("1 file could not be copied"))
    with pytest.raises(EngineError, match="could not be copied"):
        engine.down(30.0)
    for end in engine.ends.values():
        assert {"ask": "stop", "kill": True, "leftovers": True} in end.heard()


@pytest.mark.parametrize("persistent", [False, True])
def test_what_runs_on_a_node_must_be_killed_before_it_is_abandoned(engine, persistent):
    connected(engine, "master", "trainer-1")
    engine.persistent = persistent
    engine.discard(["trainer-1"])
    asked = [{"ask": "stop", "kill": True, "leftovers": True}, *[{"ask": "end"}] * persistent]
    assert engine.ends["trainer-1"].heard() == asked
    assert engine.ends["master"].heard() == [] and "trainer-1" not in engine.clients.connections
