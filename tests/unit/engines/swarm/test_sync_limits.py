"""What nodes can make this machine do while their files are copied must have limits."""

import base64
import contextlib
import threading
from typing import Any

import pytest
from support.scripted import Clock
from support.synced import FakeNode

from orchestrate.engines.connection import LARGE
from orchestrate.engines.swarm import owners
from orchestrate.engines.swarm.sync import MAX_TURN, RETRY_INTERVAL, STALL_BYTES, STALL_SECONDS, FileSync
from orchestrate.errors import EngineError
from orchestrate.node import protocol


class Trickle(FakeNode):
    """A node that sends a file as one byte in each piece, and each takes some seconds of a clock."""

    def __init__(self, clock: Clock, size: int, seconds: float = 10) -> None:
        super().__init__()
        self.clock, self.files, self.seconds, self.sent = clock, {"a": bytes(size)}, seconds, 0

    def converse(self, request: Any, answer: type, **more: Any) -> Any:
        if isinstance(request, protocol.Read):
            self.clock.now += self.seconds
            self.sent += 1
            piece = self.files[request.path][request.offset : request.offset + 1]
            return protocol.Piece(base64.b64encode(piece).decode(), request.offset, self.facts(request.path))
        return super().converse(request, answer, **more)


def test_copying_of_all_files_must_end_if_they_come_too_slowly(synced):
    clock = Clock()
    node = Trickle(clock, STALL_BYTES)
    with pytest.raises(EngineError, match="not all files were copied from the nodes in time"):
        synced(clock, master=node).copy_all(9999)
    assert STALL_SECONDS < clock.now - 1_000_000 < 5000


def test_copying_must_not_wait_again_and_again_for_a_node_that_is_gone(folder):
    clock, tried = Clock(), list[int]()
    node = Trickle(clock, 1, seconds=MAX_TURN)  # the other node is visited after each of its files
    node.files = {str(number): b"1" for number in range(30)}

    def connect(name: str) -> Any:
        if name == "trainer-1":
            tried.append(node.sent)
            raise EngineError("cannot connect")
        return node

    sync = FileSync(folder, "job", {"master": [0], "trainer-1": [1]}, connect, clock)
    try:
        sync.copy_all(9999)
        assert len([*folder.iterdir()]) == 30 and sync.silent() == {"trainer-1"}
        assert len([sent for sent in tried if 0 < sent < 30]) <= 30 * MAX_TURN / RETRY_INTERVAL
    finally:
        sync.close()


def test_copying_of_all_files_must_go_on_while_files_come(synced, folder):
    clock = Clock()
    node = Trickle(clock, 1)
    node.files = {str(number): b"1" for number in range(30)}
    synced(clock, master=node).copy_all(9999)
    assert clock.now - 1_000_000 > 2 * STALL_SECONDS and len([*folder.iterdir()]) == 30


@pytest.mark.parametrize(("limit", "value"), [("MAX_FILES", 5), ("MAX_NAMES", 10)])
def test_the_files_of_all_nodes_together_must_be_limited(synced, folder, monkeypatch, limit, value):
    monkeypatch.setattr(owners, limit, value)
    master, trainer = FakeNode(), FakeNode()
    master.files = {f"m{number}": b"1" for number in range(4)}
    trainer.files = {f"t{number}": b"1" for number in range(4)}
    sync = synced(master=master, trainer=trainer)
    assert sync.catch_up(20) and len([*folder.iterdir()]) == 5
    (warning,) = sync.warnings()
    assert warning.startswith(("master: some files are not copied", "trainer: some files are not copied"))
    master.files.clear()
    trainer.files.clear()
    assert sync.catch_up(20) and not [*folder.iterdir()]
    trainer.files = {f"n{number}": b"1" for number in range(5)}
    assert sync.catch_up(20) and len([*folder.iterdir()]) == 5  # files that are gone do not count


@pytest.mark.parametrize("size", [LARGE + 1, LARGE])
def test_only_one_large_list_must_be_handled_at_a_time(synced, size):
    """Each takes many times its size in memory."""
    large, met = size > LARGE, []
    together = threading.Barrier(2, timeout=0.5 if large else 20)

    class Node(FakeNode):
        def converse(self, request: Any, answer: type, **more: Any) -> Any:
            if isinstance(request, protocol.Read):
                with contextlib.suppress(threading.BrokenBarrierError):
                    met.append(together.wait())
            else:
                more["admit"](size)
                more["admit"](size)  # the node sends two
            return super().converse(request, answer)

    nodes = {"master": Node(), "trainer": Node()}
    for name, node in nodes.items():
        node.files = {name: b"1"}
    assert synced(**nodes).catch_up(20) and bool(met) != large
