"""What nodes can make this machine do while their files are copied must have limits."""

import base64
import threading
from typing import Any

import pytest
from support.scripted import Clock
from support.synced import FakeNode
from support.waiting import eventually

from orchestrate.engines.swarm import owners
from orchestrate.engines.swarm.sync import LARGE, STALL_BYTES, STALL_SECONDS
from orchestrate.errors import EngineError
from orchestrate.node import protocol


class Trickle(FakeNode):
    """A node that sends a file as one byte in each piece, and each takes ten seconds of a clock."""

    def __init__(self, clock: Clock, size: int) -> None:
        super().__init__()
        self.clock, self.files, self.sent = clock, {"a": bytes(size)}, 0

    def converse(self, request: Any, answer: type, **more: Any) -> Any:
        if isinstance(request, protocol.Read):
            self.clock.now += 10
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


def test_copying_of_all_files_must_go_on_while_files_come(synced, folder):
    clock = Clock()
    node = Trickle(clock, 1)
    node.files = {str(number): b"1" for number in range(30)}
    synced(clock, master=node).copy_all(9999)
    assert clock.now - 1_000_000 > 2 * STALL_SECONDS and len([*folder.iterdir()]) == 30


def test_the_files_of_all_nodes_together_must_be_limited(synced, folder, monkeypatch):
    monkeypatch.setattr(owners, "MAX_FILES", 5)
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
    trainer.files = {f"new{number}": b"1" for number in range(5)}
    assert sync.catch_up(20) and len([*folder.iterdir()]) == 5  # files that are gone do not count


@pytest.mark.parametrize(("size", "at_once"), [(LARGE + 1, 1), (LARGE, 3)])
def test_only_one_large_list_must_be_handled_at_a_time(synced, size, at_once):
    """Each takes many times its size in memory."""
    handled, most, gate = set[str](), [0], threading.Event()

    class Large(FakeNode):
        def converse(self, request: Any, answer: type, **more: Any) -> Any:
            if isinstance(request, protocol.Read):
                handled.add(request.path)
                most[0] = max(most[0], len(handled))
                if len(handled) == at_once:
                    gate.set()
                assert gate.wait(20)
                handled.discard(request.path)
            else:
                more["admit"](size)
                more["admit"](size)  # the node sends two
            return super().converse(request, answer)

    nodes = {name: Large() for name in ("master", "trainer-1", "trainer-2")}
    for name, node in nodes.items():
        node.files = {name: b"1"}
    sync = synced(**nodes)
    assert eventually(lambda: sync.catch_up(20)) and most == [at_once]
