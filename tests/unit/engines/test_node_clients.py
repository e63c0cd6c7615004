"""Connections to nodes, for every engine: start workers in order, collect their exits, detect lost ones."""

import dataclasses
import threading
from collections.abc import Iterator

import pytest
from support.fake_nodes import Node, Nodes, asks, planned
from support.scripted import Clock

from orchestrate.engines import node_clients
from orchestrate.engines.base import Stop
from orchestrate.errors import EngineLost
from orchestrate.record.outcomes import Activity, Use


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    nodes = Nodes(3)
    yield nodes
    nodes.close()


def lost(nodes: Nodes) -> list[int]:
    """The ranks of workers that have ended, all of which must have been lost with their nodes."""
    ended = nodes.wait(1)
    assert {end.code for end in ended} <= {137}
    return [end.rank for end in ended]


def test_the_other_workers_must_start_once_after_rank_0(nodes):
    nodes.start(planned(command=("x.py", "-a")))
    first, *others = nodes.fakes.values()
    (request,) = first.asked()
    assert (request["ask"], request["command"]) == ("start", ["x.py", "-a"])
    assert (request["inherit"], request.get("cwd")) == (True, None)
    assert request["env"] == {"RANK": "0", "TORCHELASTIC_RESTART_COUNT": "0"}
    assert [node.asked() for node in others] == [[], []]
    first.say("started", generation=0, rank=0, pid=70)
    assert nodes.wait(1) == []
    assert [[request["env"]["RANK"] for request in node.asked()] for node in others] == [["1"], ["2"]]
    others[0].say("started", generation=0, rank=1, pid=71)
    assert nodes.wait(1) == []
    assert [node.asked() for node in nodes.fakes.values()] == [[], [], []]
    assert nodes.pids == {0: 70, 1: 71}


def test_the_other_workers_must_start_once_the_node_of_rank_0_listens_for_the_store(nodes):
    nodes.start(planned())
    first, *others = nodes.fakes.values()
    others[0].say("listening", generation=0)
    first.say("listening", generation=7)
    assert nodes.wait(1) == [] and [node.asked() for node in others] == [[], []]
    first.say("listening", generation=0)
    first.say("started", generation=0, rank=0, pid=70)
    assert nodes.wait(1) == [] and [asks(node) for node in others] == [["start"], ["start"]]


def test_a_worker_whose_node_is_missing_must_be_lost_at_once(nodes):
    nodes.up -= {"node-2"}
    nodes.start(planned())
    nodes.fakes["node-0"].say("started", generation=0, rank=0, pid=70)
    assert lost(nodes) == [2]
    assert set(nodes.running) == {0, 1}


def test_rank_0_must_be_lost_at_once_if_its_node_is_missing(nodes):
    nodes.up -= {"node-0"}
    nodes.start(planned())
    later = threading.Timer(0.2, nodes.fakes["node-1"].ended, (1, 1))
    later.start()
    assert [(end.rank, end.code) for end in nodes.wait(30)] == [(0, 137)]  # without waiting for others
    later.join()
    assert [(end.rank, end.code) for end in nodes.wait(30)] == [(1, 1)]


def test_a_generation_must_start_without_state_of_the_previous_one(nodes):
    nodes.start(planned())
    node = nodes.fakes["node-0"]
    node.ended(0, 1, hint="oom")
    nodes.listen(1)
    nodes.broken.add("node-1")
    nodes.pids = {2: 9}
    nodes.start(planned(2, generation=1, command=("y.py",)))
    assert (nodes.generation, nodes.running) == (1, {0: "node-0", 1: "node-1"})
    assert (nodes.pids, nodes.exit_hints, nodes.broken, nodes.ended) == ({}, {}, set(), [])
    node.asked()
    node.ended(0, 9)  # from the previous generation
    node.say("started", generation=0, rank=0, pid=70)
    assert nodes.wait(1) == [] and not nodes.pids
    assert nodes.fakes["node-1"].asked() == []  # its worker waits for rank 0 of its own generation
    node.ended(0, 3, generation=1)
    assert [(end.rank, end.code) for end in nodes.wait(1)] == [(0, 3)]


def test_a_recreated_node_must_not_be_taken_for_the_previous_one(nodes):
    nodes.start(planned(1))
    node = nodes.again("node-0")
    nodes.start(planned(1, generation=1))
    assert asks(node) == ["start"]
    assert nodes.wait(0) == []


# --- exits


def test_the_exit_of_a_worker_must_be_reported_once_with_the_hint_of_its_node(nodes):
    nodes.start(planned())
    node = nodes.fakes["node-1"]
    node.ended(1, 137, hint="oom", stopping=True)
    node.ended(1, 0, hint="ending")
    assert [(end.rank, end.code, end.stopping) for end in nodes.wait(1)] == [(1, 137, True)]
    assert nodes.exit_hints == {1: "oom"}
    assert nodes.wait(0) == []
    nodes.fakes["node-2"].ended(2, 1)
    assert [(end.rank, end.stopping) for end in nodes.wait(1)] == [(2, False)]


def test_a_worker_must_be_lost_if_its_node_disconnects_and_is_not_running(nodes):
    nodes.start(planned())
    nodes.fakes["node-1"].end()
    assert lost(nodes) == [1]
    assert set(nodes.running) == {0, 2}
    for rank in (0, 2):  # both at once
        nodes.fakes[f"node-{rank}"].end()
    assert sorted(lost(nodes)) == [0, 2]
    nodes.fakes |= {name: Node() for name in nodes.fakes}  # with the same descriptor numbers
    nodes.start(planned(generation=1))
    assert [asks(node) for node in nodes.fakes.values()] == [["start"], [], []]


def test_a_worker_must_be_lost_if_its_node_ends_while_the_worker_starts(nodes):
    nodes.start(planned())
    nodes.fakes["node-0"].say("started", generation=0, rank=0, pid=70)
    nodes.fakes["node-1"].end()
    assert lost(nodes) == [1]
    assert nodes.wait(0) == []


def test_a_worker_lost_before_its_start_must_not_end_again_when_the_job_is_stopped(nodes):
    nodes.start(planned())
    nodes.fakes["node-1"].end()
    assert lost(nodes) == [1]
    nodes.stop(Stop.TERMINATE)
    assert [(end.rank, end.code) for end in nodes.wait(0)] == [(2, 143)]


def test_a_reconnected_node_must_be_asked_again_for_its_workers(nodes):
    nodes.start(planned())
    nodes.look, nodes.running[3] = ["node-1"], "node-1"
    nodes.again("node-1").knows(running={"1": {"pid": 7}})
    assert lost(nodes) == [3]  # the node does not know it
    assert nodes.running == {0: "node-0", 1: "node-1", 2: "node-2"}
    assert nodes.pids == {1: 7}
    nodes.fakes["node-1"].ended(1, 5)
    assert [(end.rank, end.code) for end in nodes.wait(1)] == [(1, 5)]


def test_nodes_that_stop_responding_must_be_declared_lost_together(nodes, monkeypatch):
    nodes.start(planned())
    nodes.look, requests, ask = ["node-0", "node-1", "node-2"], [], nodes.ask

    def silent(names: set[str], patience: float = 10.0) -> dict:
        requests.append(set(names))
        return ask(names, 0.01)

    monkeypatch.setattr(nodes, "ask", silent)
    for name in ("node-0", "node-1", "node-2"):
        nodes.again(name)
    ended = []
    while len(ended) < 3:
        ended += nodes.wait(30)
    assert {"node-0", "node-1", "node-2"} in requests
    assert sorted((end.rank, end.code) for end in ended) == [(0, 137), (1, 137), (2, 137)]


def test_a_node_that_cannot_be_reconnected_must_be_declared_lost_after_the_time_limit(nodes, monkeypatch):
    nodes.clock = clock = Clock()
    began = clock.now
    nodes.start(planned())
    monkeypatch.setattr(nodes.access, "runs", lambda node: True)
    nodes.up -= {"node-1"}
    nodes.fakes["node-1"].end()
    assert lost(nodes) == [1] and 4 < clock.now - began < 6


def test_an_exit_code_must_be_fetched_later_from_a_node_that_was_unreachable(nodes):
    nodes.start(planned())
    nodes.look, nodes.running[3] = ["node-1"], "node-1"
    nodes.again("node-1").knows(codes={"1": 5}, running={"3": {"pid": 7}})
    assert [(end.rank, end.code) for end in nodes.wait(1)] == [(1, 5)]
    assert nodes.running == {0: "node-0", 2: "node-2", 3: "node-1"}


# --- taking over


def test_a_worker_whose_node_reports_only_its_exit_code_must_have_ended(nodes):
    nodes.fakes["node-0"].knows(codes={"0": 3})
    for rank in (1, 2):
        nodes.fakes[f"node-{rank}"].knows(running={str(rank): {}})
    assert nodes.adopt(planned()) == set()
    assert [(end.rank, end.code) for end in nodes.wait(0)] == [(0, 3)]
    assert nodes.exit_hints == {0: ""}


def test_workers_must_be_adopted_in_the_state_that_their_nodes_report(nodes):
    nodes.up -= {"node-2"}
    nodes.fakes["node-0"].knows(4, running={"0": {"pid": 7}})
    used = Use(exchanged=7, connected=1.0, sampled=2.0, gpu=False, torch=True, version="2.9")
    nodes.fakes["node-1"].knows(4, codes={"1": 0}, hints={"1": "ending"}, uses={"1": dataclasses.asdict(used)})
    assert nodes.adopt(planned(generation=4)) == set()
    assert [asks(nodes.fakes[f"node-{rank}"]) for rank in (0, 1)] == [["status"], ["status"]]
    ended = sorted((end.rank, end.code, end.use) for end in nodes.wait(0))
    assert ended == [(1, 0, used), (2, 137, None)]
    assert (nodes.running, nodes.pids, nodes.exit_hints) == ({0: "node-0"}, {0: 7}, {1: "ending"})


@pytest.mark.parametrize("generation", [3, 5])
def test_workers_unknown_to_running_nodes_must_be_returned(nodes, generation):
    for rank in (0, 2):
        nodes.fakes[f"node-{rank}"].knows(4, running={str(rank): {"pid": 0}})
    nodes.fakes["node-1"].knows(generation, running={"1": {"pid": 8}})
    assert nodes.adopt(planned(generation=4)) == {1}
    assert set(nodes.running) == {0, 1, 2}
    assert not nodes.pids  # 0: no process yet


def test_a_node_that_may_recover_must_not_count_as_lost(nodes):
    nodes.fakes["node-0"].knows()
    nodes.up, nodes.there = {"node-0"}, {"node-1"}
    with pytest.raises(EngineLost, match="node-1 does not respond"):
        nodes.adopt(planned(2))
    nodes.again("node-0").knows()
    nodes.there = set()
    assert nodes.adopt(planned(2)) == {0}
    assert lost(nodes) == [1]


def test_workers_waiting_to_be_started_must_not_be_started_after_an_adoption(nodes):
    nodes.start(planned())
    for name in nodes.fakes:
        nodes.again(name).knows(running={"0": {"pid": 7}})
    assert nodes.adopt(planned()) == {1, 2}
    nodes.fakes["node-0"].say("started", generation=0, rank=0, pid=7)
    assert nodes.wait(1) == []
    assert [asks(node) for node in nodes.fakes.values()] == [["status"]] * 3


# --- requests while workers run


def test_the_activity_of_workers_must_be_what_their_nodes_report_now(nodes, monkeypatch):
    nodes.start(planned())
    idle = {"pid": 7, "state": "S", "cpu": 1.5}
    nodes.fakes["node-0"].knows(running={"0": idle, "3": {**idle, "state": ""}})
    nodes.fakes["node-1"].knows(running={"1": {"pid": 8, "state": "R", "cpu": 0.0}})
    clock, listen = Clock(), nodes.listen
    nodes.clock = clock
    monkeypatch.setattr(nodes, "listen", lambda timeout: (listen(0), clock.sleep(timeout)))
    began = clock.now
    assert nodes.activity() == {0: Activity("S", 1.5, pid=7), 1: Activity("R", 0.0, pid=8)}
    assert nodes.activity() == {}  # an earlier answer does not count
    assert clock.now - began < 3  # the limit for nodes that do not answer


def test_a_node_that_dies_during_a_request_must_not_be_waited_for(nodes, monkeypatch):
    nodes.start(planned())
    for rank in (0, 2):
        nodes.fakes[f"node-{rank}"].knows(running={})
    listen, calls = nodes.listen, []

    def ends(timeout: float) -> None:
        calls.append(timeout)
        nodes.fakes["node-1"].end()
        listen(timeout)

    monkeypatch.setattr(nodes, "listen", ends)
    assert nodes.activity() == {}
    assert nodes.broken == {"node-1"} and len(calls) < 4


@pytest.mark.parametrize("kill", [False, True])
def test_a_stop_must_be_sent_to_all_nodes_with_its_kind(nodes, kill):
    nodes.start(planned())
    nodes.stop(Stop.KILL if kill else Stop.TERMINATE)
    requests = [node.asked()[-1] for node in nodes.fakes.values()]
    assert requests == [{"ask": "stop", "kill": kill, "leftovers": False}] * 3
    nodes.fakes["node-0"].say("started", generation=0, rank=0, pid=70)
    nodes.wait(1)
    assert [node.asked() for node in nodes.fakes.values()] == [[], [], []]  # no more workers start


def test_all_workers_must_be_frozen_before_any_of_them_prints_its_stack(nodes, monkeypatch):
    nodes.start(planned())
    listen, seen = nodes.listen, []

    def answered(timeout: float) -> None:
        for node in nodes.fakes.values():
            if "status" in (asked := asks(node)):
                seen.append(asked)
                node.knows(time=0.0)
        listen(timeout)

    nodes.fakes["node-0"].say("started", generation=0, rank=0, pid=70)
    nodes.wait(1)
    for node in nodes.fakes.values():
        node.asked()
    monkeypatch.setattr(nodes, "listen", answered)
    nodes.stop(Stop.DUMP)
    assert seen == [["freeze", "status"]] * 3
    assert [asks(node) for node in nodes.fakes.values()] == [["dump"]] * 3


def test_nodes_that_stay_up_must_confirm_that_they_are_clean(nodes, monkeypatch):
    nodes.start(planned())
    remaining = iter(nodes.fakes.values())
    listen = nodes.listen

    def next_one(timeout: float) -> None:
        next(remaining).say("cleaned")
        listen(timeout)

    monkeypatch.setattr(nodes, "listen", next_one)
    assert not nodes.clean(nodes.fakes)
    assert [asks(node)[-1] for node in nodes.fakes.values()] == ["clean"] * 3
    assert next(remaining, None) is None  # all have confirmed
    monkeypatch.setattr(nodes, "listen", listen)
    monkeypatch.setattr(node_clients, "ANSWER_TIMEOUT", 0.01)
    assert nodes.clean(nodes.fakes) == {*nodes.fakes}  # none answers


def test_a_disconnected_node_must_be_reconnected_and_cleaned_or_be_returned(nodes, monkeypatch):
    monkeypatch.setattr(node_clients, "ANSWER_TIMEOUT", 0.01)
    nodes.up -= {"node-2"}
    nodes.fakes["node-0"].say("cleaned")
    assert nodes.clean(nodes.fakes) == {"node-1", "node-2"}
    assert asks(nodes.fakes["node-0"]) == ["clean"]


REFUSED = {"text": "start: 'X'", "long": "x" * 100_000, "lines": "a\nsucceeded: 2 workers"}


@pytest.mark.parametrize("error", REFUSED.values(), ids=REFUSED)
def test_a_refused_request_must_fail_its_worker_and_warn_with_node_and_reason(nodes, error):
    nodes.start(planned())
    nodes.fakes["node-0"].say("refused", error=error)
    ended = []
    while not ended:  # a long message arrives in pieces
        ended = nodes.wait(30)
    assert [(end.rank, end.code, end.stopping) for end in ended] == [(0, 126, False)]
    (warning,) = nodes.warnings()
    assert warning.startswith(f"node-0 refused a request: {' '.join(error[:100].split())}") and len(warning) < 300
    assert nodes.warnings() == [] and nodes.running.keys() == {1, 2}


def test_a_refused_request_must_not_end_a_running_worker(nodes):
    nodes.start(planned(1))
    nodes.fakes["node-0"].say("started", generation=0, rank=0, pid=70)
    assert nodes.wait(30) == []
    nodes.fakes["node-0"].say("refused", error="unknown request 'x'")
    assert nodes.wait(30) == [] and nodes.running == {0: "node-0"} and len(nodes.warnings()) == 1


def test_repeated_refusals_of_a_node_must_be_reported_once(nodes):
    nodes.start(planned(1))
    for _ in range(10):
        nodes.fakes["node-0"].say("refused", error="no")
    nodes.fakes["node-0"].knows()
    while not nodes.statuses:
        nodes.wait(30)
    assert len(nodes.warnings()) == 1
    nodes.start(planned(1, generation=1))
    nodes.fakes["node-0"].say("refused", error="no")
    assert nodes.wait(30) and len(nodes.warnings()) == 1


def test_a_node_must_be_trusted_only_about_its_own_workers(nodes):
    nodes.start(planned())
    busy = {"pid": 7, "state": "R", "cpu": 5.0}
    nodes.fakes["node-0"].knows(running={"0": busy, "1": busy | {"cpu": 99.0}})
    nodes.fakes["node-1"].knows(running={"1": busy})
    nodes.fakes["node-2"].knows()
    assert nodes.activity() == {0: Activity("R", 5.0, pid=7), 1: Activity("R", 5.0, pid=7)}


def test_nodes_must_count_as_warm_only_after_their_imports(nodes):
    names = ["node-0", "node-1"]
    nodes.fakes["node-0"].knows()
    nodes.fakes["node-1"].knows(importing=True)
    assert not nodes.wait_until_warm(names, 0)
    for name in names:
        nodes.fakes[name].knows()
    assert nodes.wait_until_warm(names, 60)


def test_an_unreachable_node_must_not_count_as_warm(nodes):
    nodes.up.discard("node-1")
    nodes.fakes["node-0"].knows()
    assert not nodes.wait_until_warm(["node-0", "node-1"], 0)
