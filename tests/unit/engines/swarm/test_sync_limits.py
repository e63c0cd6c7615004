"""What nodes can make this machine do while their files are copied must have limits."""

import base64
import contextlib
import threading
from typing import Any

import pytest
from support.scripted import Clock
from support.synced import FakeNode
from support.waiting import eventually

from orchestrate.engines.connection import LARGE
from orchestrate.engines.swarm import owners
from orchestrate.engines.swarm import sync as sync_module
from orchestrate.engines.swarm.fetch import Fetch
from orchestrate.engines.swarm.sync import STALL_BYTES, STALL_SECONDS, FileSync
from orchestrate.errors import EngineError
from orchestrate.files.folder import Folder
from orchestrate.node.messages import protocol


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


def test_copying_from_a_node_must_not_wait_for_one_that_does_not_answer(folder, monkeypatch):
    monkeypatch.setattr(sync_module, "SYNC_INTERVAL", 0.01)
    gate, nodes = threading.Event(), {"master": FakeNode(), "trainer-1": FakeNode()}

    def connect(name: str) -> Any:
        return nodes[name] if name == "master" or gate.wait() else None

    sync = FileSync(folder, "job", {"master": [0], "trainer-1": [1]}, connect)
    try:
        for name in "ab":
            nodes["master"].files[name] = b"1"
            eventually((folder / name).exists)
        sync.give_up("trainer-1")
        nodes["master"].files["c"] = b"1"
        sync.copy_all(9999)
        assert (folder / "c").exists() and sync.silent() == {"trainer-1"}
        gate.set()
        nodes["trainer-1"].files["d"] = b"1"
        eventually(lambda: sync.catch_up(20) and not sync.silent())  # from here on, it is waited for
        nodes["trainer-1"].files["e"] = b"1"
        sync.copy_all(9999)
        assert (folder / "d").exists() and (folder / "e").exists()
    finally:
        gate.set()
        sync.close()


def test_closing_must_not_wait_for_a_node_that_was_given_up(folder, monkeypatch):
    monkeypatch.setattr(sync_module, "CLOSE_TIMEOUT", float("inf"))
    gate = threading.Event()

    def connect(name: str) -> None:
        gate.wait()

    sync = FileSync(folder, "job", {"master": [0]}, connect)
    try:
        sync.give_up("master")
        sync.close()
        (thread,) = sync.threads
        assert thread.is_alive()
    finally:
        gate.set()


def test_copying_of_all_files_must_go_on_while_files_come(synced, folder):
    clock = Clock()
    node = Trickle(clock, 1)
    node.files = {str(number): b"1" for number in range(30)}
    synced(clock, master=node).copy_all(9999)
    assert clock.now - 1_000_000 > 2 * STALL_SECONDS and len([*folder.iterdir()]) == 30


def test_a_log_that_comes_slowly_must_be_copied_to_what_it_had_when_the_wait_began(synced, folder):
    clock, node = Clock(), FakeNode()
    text, converse = b"0123456789" * 30, node.converse

    def slowly(request: Any, answer: type, **_: object) -> Any:
        if isinstance(request, protocol.GetChanges):  # each brings ten bytes
            clock.now += 50
            node.logs["logs/rank-0.log"] += b"+" * 5  # by processes that the worker has left
        return converse(request, answer)

    (folder / "logs").mkdir()
    node.logs, node.converse = {"logs/rank-0.log": text}, slowly
    assert synced(clock, master=node).catch_up(99_999)
    assert (folder / "logs" / "rank-0.log").read_bytes().startswith(text)


@pytest.mark.parametrize(("limit", "value"), [("MAX_FILES", 5), ("MAX_NAMES", 10)])
def test_the_files_of_all_nodes_together_must_be_limited(synced, folder, monkeypatch, limit, value):
    monkeypatch.setattr(owners, limit, value)
    master, trainer = FakeNode(), FakeNode()
    master.files = {f"m{number}": b"1" for number in range(4)}
    trainer.files = {f"t{number}": b"1" for number in range(4)}
    sync = synced(master=master, trainer=trainer)
    assert sync.catch_up(20) and len([*folder.iterdir()]) == 5
    warnings = sync.warnings()
    assert warnings and all(": some files are not copied" in warning for warning in warnings)
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


@pytest.mark.parametrize(("inside", "kept"), [(b"", True), (b"z", False)])
def test_a_large_hole_of_a_file_that_grows_must_not_be_read(folder, inside, kept):
    def fetched(size: int, *pieces: tuple[int, bytes]) -> bool:
        fetch = Fetch(Folder(folder.parent, folder.name), "big", [size, 1, 5, 0o644], "master")
        fetch.goes_on([size + 1, 2, 5, 0o644])
        for offset, data in pieces:
            fetch.write(data, offset)
        return fetch.keep()

    end = 1 << 40
    assert fetched(end + 1, (0, b"1"), (end, b"x"))
    assert fetched(end + 2, (0, b"1"), *([(1 << 30, inside)] * bool(inside)), (end, b"xy")) is kept
    with (folder / "big").open("rb") as file:
        file.seek(end)
        assert file.read() == (b"xy" if kept else b"x")
