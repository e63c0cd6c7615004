"""What nodes are sent with the start of a worker, and what of their reports is used; with simulated nodes."""

import contextlib
import dataclasses
import threading
from collections.abc import Iterator

import pytest
from support.ends import connected
from support.fake_nodes import Nodes, asks, planned
from support.messages import message
from support.scripted import Clock

from orchestrate.engines.base import Stop
from orchestrate.node.messages import protocol
from orchestrate.record.outcomes import Activity, Use
from orchestrate.spec.spec import JobSpec

USED = Use(exchanged=7, connected=1.0, sampled=2.0, gpu=False, torch=True, version="2.9")


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    nodes = Nodes(2)
    yield nodes
    nodes.close()


def test_secrets_must_be_sent_as_files_whose_paths_the_job_may_override(nodes):
    nodes.access.spec = JobSpec(contents={"TOKEN": "x", "RANK": "y"})
    nodes.start(planned(1))
    (request,) = nodes.fakes["node-0"].asked()
    assert request["secrets"] == {"/run/secrets/TOKEN": "x", "/run/secrets/RANK": "y"}
    assert (request["env"]["TOKEN_FILE"], request["env"]["RANK"]) == ("/run/secrets/TOKEN", "0")
    plan = planned(1, generation=1)
    plan.workers[0].env["TOKEN_FILE"] = "mine"
    nodes.start(plan)
    assert nodes.fakes["node-0"].asked()[0]["env"]["TOKEN_FILE"] == "mine"


def test_all_nodes_must_run_the_command_before_workers_at_the_same_time(nodes):
    nodes.access.spec = JobSpec(before=("prepare", "$HERE"))
    nodes.start(planned())
    assert [node.asked()[0]["before"] for node in nodes.fakes.values()] == [["prepare", "$HERE"]] * 2
    nodes.fakes["node-0"].say("started", generation=0, rank=0, pid=70)
    assert [end.rank for end in nodes.wait(1)] == [2]  # its node is missing
    assert [node.asked() for node in nodes.fakes.values()] == [[], []]


def test_what_a_worker_has_used_must_be_in_its_exit_and_its_activity(nodes):
    nodes.start(planned(2))
    nodes.fakes["node-0"].ended(0, 1, use=dataclasses.asdict(USED))
    assert [end.use for end in nodes.wait(1)] == [USED]
    doing = {"1": {"state": "R", "cpu": 2.5, "memory": 9}}
    nodes.fakes["node-1"].knows(running=doing, uses={"1": dataclasses.asdict(USED)})
    assert nodes.activity() == {1: Activity("R", 2.5, 9, USED, pid=7)}


def test_a_node_must_not_end_the_worker_of_another_node(nodes):
    nodes.start(planned(2))
    nodes.fakes["node-1"].ended(0, 9)
    nodes.fakes["node-1"].say("started", generation=0, rank=0, pid=70)
    nodes.fakes["node-1"].ended(1, 1)
    assert [end.rank for end in nodes.wait(1)] == [1] and nodes.running == {0: "node-0"} and not nodes.pids


def test_the_connection_of_a_node_that_sends_nonsense_must_be_closed(nodes):
    nodes.start(planned(1))
    node = nodes.fakes["node-0"]
    node.asked()
    node.here.sendall(b"nonsense\n")
    assert [end.code for end in nodes.wait(1)] == [137]
    assert node.here.recv(1) == b""


def test_workers_of_one_node_must_share_a_connection(nodes):
    asked: list[str] = []
    nodes.access.connect = asked.append
    nodes.start(planned(4, per_node=2))
    nodes.adopt(planned(4, per_node=2))
    assert sorted(asked) == ["node-0", "node-0", "node-1", "node-1"]  # once at the start, and once to take over


def test_a_node_that_is_gone_must_not_keep_a_request_from_the_others(nodes):
    nodes.start(planned(2))
    nodes.fakes["node-0"].end()
    nodes.stop(Stop.KILL)
    assert {*nodes.connections} == {"node-1"} and [each["ask"] for each in nodes.fakes["node-1"].asked()] == ["stop"]


def test_silent_nodes_must_be_waited_for_only_briefly_while_workers_run(nodes):
    nodes.start(planned(2))
    nodes.clock = clock = Clock()
    nodes.listen, began = clock.sleep, clock.now
    nodes.stop(Stop.DUMP)
    assert not nodes.wait_until_warm(nodes.fakes, 0) and clock.now - began < 4


@pytest.mark.parametrize("asks", [False, True])
def test_a_long_report_must_end_a_connection_on_which_none_is_expected(asks):
    link, node = connected()
    line = node.signer.sign(protocol.encode(message("changes", files={"x" * (2 << 20): [1, 2, 3, 4]}))) + b"\n"

    def send() -> None:
        with contextlib.suppress(OSError):
            node.sock.sendall(line)

    sender = threading.Thread(target=send)
    sender.start()
    if asks:
        with pytest.raises(ConnectionError):
            link.converse(protocol.Read("/job", "x", 0), protocol.Piece, 60)
    else:
        received: list[protocol.Report] | None = []
        while received == []:
            received = link.receive()
        assert received is None
    link.close(), node.sock.close()
    sender.join()


def test_a_node_that_does_not_answer_must_not_be_asked_again_before_it_does(nodes):
    nodes.start(planned())
    node = nodes.fakes["node-0"]
    node.asked()
    for _ in range(3):
        assert nodes.ask(["node-0"], 0.01) == {}
    assert asks(node) == ["status"]
    node.knows()
    assert {*nodes.ask(["node-0"], 1)} == {"node-0"} and asks(node) == []
    assert nodes.ask(["node-0"], 0.01) == {} and asks(node) == ["status"]
