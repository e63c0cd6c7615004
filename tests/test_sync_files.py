"""Which files of nodes are copied to this machine and which are not, with fake nodes."""

import base64
import contextlib
import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import eventually
from support.scripted import Clock

from orchestrate.engines.swarm import fetch
from orchestrate.engines.swarm import sync as sync_module
from orchestrate.engines.swarm.sync import OWN, FileSync
from orchestrate.errors import EngineError
from orchestrate.files.folder import MAX_DEPTH
from orchestrate.files.paths import JobPaths
from orchestrate.node import protocol
from orchestrate.node.files import PIECE


class FakeNode:
    """A connection to a fake node that has these files."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.times: dict[str, int] = {}
        self.links: dict[str, str] = {}
        self.gone: list[str] = []
        self.logs: dict[str, bytes] = {}
        self.refused: set[str] = set()
        self.requests: list[str] = []
        self.changes: dict[str, bytes] = {}  # files that are replaced while they are read
        self.closed = self.dead = False
        self.ended = threading.Event()

    def facts(self, path: str) -> list[int]:
        return [len(self.files[path]), self.times.get(path, 1), 1, 0o644]

    def converse(self, request: Any, answer: type) -> Any:
        assert request.folder == "job"
        if self.dead:
            raise ConnectionError
        if isinstance(request, protocol.GetChanges):
            have = request.have
            files = {name: self.facts(name) for name in self.files}
            more = {log: text[have.get(log, 0) :][:10] for log, text in self.logs.items()}
            logs = {log: base64.b64encode(text).decode() for log, text in more.items() if text}
            return protocol.Changes(logs, files, dict(self.links), list(self.gone))
        path, offset = request.path, request.offset
        self.requests.append(path)
        if path in self.refused:
            raise EngineError("node error: it cannot be read")
        data = self.files[path][offset : offset + PIECE]
        if path in self.changes:
            self.files[path], self.times[path] = self.changes.pop(path), 2
        return protocol.Piece(base64.b64encode(data).decode(), offset, self.facts(path))

    def close(self) -> None:
        self.closed = True

    def interrupt(self) -> None:
        self.ended.set()


def sync_master(folder: Path, connect: Callable[[str], Any]) -> FileSync:
    """Start to copy the files of the master, to which `connect` connects."""
    return FileSync(folder, "job", {"master": [0]}, connect)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "folder").mkdir()
    return tmp_path / "folder"


@pytest.fixture
def synced(folder, monkeypatch):
    """Start to copy the files of nodes, which are given by name; return the running copy."""
    monkeypatch.setattr(sync_module, "SYNC_INTERVAL", 0.01)
    started: list[FileSync] = []

    def start(**nodes: Any) -> FileSync:
        ranks = {name: [rank] for rank, name in enumerate(nodes)}
        started.append(FileSync(folder, "job", ranks, lambda name: nodes[name]))
        return started[-1]

    yield start
    for sync in started:
        sync.close()


def test_a_file_must_be_fetched_once_and_again_when_it_has_changed(folder, synced):
    node = FakeNode()
    node.files, node.times = {"a/b/state.pt": b"1"}, {"a/b/state.pt": 10**18 + 7}
    sync = synced(master=node)
    for _ in range(2):
        assert sync.catch_up(20)
    assert node.requests == ["a/b/state.pt"] and (folder / "a/b/state.pt").stat().st_mtime_ns == 10**18 + 7
    node.files["a/b/state.pt"], node.times["a/b/state.pt"] = b"2", 10**18 + 8
    assert sync.catch_up(20)
    assert node.requests == ["a/b/state.pt"] * 2 and (folder / "a/b/state.pt").read_bytes() == b"2"


@pytest.mark.parametrize(("content", "time", "count"), [(b"old", 5, 0), (b"old", 6, 1), (b"older", 5, 1)])
def test_files_that_an_earlier_supervisor_has_copied_must_not_be_fetched_again(folder, synced, content, time, count):
    (folder / "state.pt").write_bytes(b"old")
    os.utime(folder / "state.pt", ns=(5, 5))
    node = FakeNode()
    node.files, node.times = {"state.pt": content}, {"state.pt": time}
    assert synced(master=node).catch_up(20)
    assert len(node.requests) == count and (folder / "state.pt").read_bytes() == content


def test_a_file_that_is_replaced_while_it_is_fetched_must_be_copied_in_its_new_version(folder, synced):
    node = FakeNode()
    node.files, node.changes = {"state.pt": b"1" * (PIECE + 1)}, {"state.pt": b"2" * 3}
    sync = synced(master=node)
    assert sync.catch_up(20) and not sync.errors
    assert (folder / "state.pt").read_bytes() == b"222" and len(node.requests) == 2
    assert [path.name for path in folder.iterdir()] == ["state.pt"]  # and no partial file


def test_a_file_with_a_long_name_must_be_copied(folder, synced):
    node = FakeNode()
    node.files = {"x" * 250: b"1", f"{'x' * 249}y": b"2"}
    sync = synced(master=node)
    assert sync.catch_up(20) and not sync.errors
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == node.files


def test_a_file_that_cannot_be_read_must_be_retried_only_after_a_while_or_a_change(folder, synced, monkeypatch):
    clock, node = Clock(), FakeNode()
    monkeypatch.setattr(sync_module, "time", clock)
    node.files, node.refused = {"bad": b"1", "good": b"2"}, {"bad"}
    converse = node.converse

    def later(request: Any, answer: type) -> Any:
        clock.now += 0.001
        return converse(request, answer)

    node.converse = later
    sync = synced(master=node)

    def attempts() -> int:
        """How often the file is requested in four rounds."""
        before, rounds = node.requests.count("bad"), sync.looks
        while sync.looks < rounds + 4:
            with sync.changed:
                sync.changed.wait(1)
        return node.requests.count("bad") - before

    assert sync.catch_up(20)
    assert attempts() == 0 and node.requests.count("good") == 1
    with pytest.raises(EngineError, match="1 file could not be copied, such as 'bad': node error: it cannot be read"):
        sync.copy_all(20)  # retries it
    assert node.requests.count("bad") > 1
    clock.now += sync_module.RETRY_INTERVAL + 0.1
    assert attempts() == 1
    node.times["bad"] = 9  # the file has changed
    assert attempts() == 1
    del node.files["bad"]
    sync.copy_all(20)
    assert not sync.errors


@pytest.mark.parametrize(("number", "full"), [(errno.ENOSPC, True), (errno.EDQUOT, True), (errno.EACCES, False)])
def test_a_full_disk_must_be_distinguished_from_other_errors(synced, number, full):
    sync = synced(master=FakeNode())
    sync.errors = {"a": EngineError("x"), "b": OSError(number, os.strerror(number))}
    if not full:
        return sync.lacks_space()
    with pytest.raises(OSError) as raised:
        sync.lacks_space()
    assert (raised.value.errno, raised.value.filename) == (number, "b")


def test_the_wait_for_files_must_respect_its_time_limit(folder, monkeypatch):
    class Ticking(Clock):
        """A clock that advances by a second each time it is read."""

        def monotonic(self) -> float:
            self.now += 1
            return self.now

    gate, clock = threading.Event(), Ticking()
    monkeypatch.setattr(sync_module, "time", clock)
    monkeypatch.setattr(sync_module, "SYNC_INTERVAL", 0.01)
    sync, began = sync_master(folder, lambda _: gate.wait() and None), clock.now
    try:
        assert not sync.catch_up(0, lambda: clock.now > began + 100)
        assert not sync.catch_up(100, lambda: True)
        with pytest.raises(EngineError, match="not all files were copied from the nodes within 0 s"):
            sync.copy_all(0)
        assert clock.now < began + 20
    finally:
        gate.set()
        sync.close()
    assert sync.catch_up(100)  # nothing more is copied


def test_the_wait_for_files_must_be_interruptible(folder, synced):
    node, requested = FakeNode(), threading.Event()
    node.files, converse = {"endless": b"1"}, node.converse

    def endless(request: Any, answer: type) -> Any:
        requested.set()
        reply = converse(request, answer)
        if isinstance(request, protocol.GetChanges):
            return reply
        return reply._replace(data=base64.b64encode(b"1").decode(), offset=request.offset)

    node.converse, node.facts = endless, lambda path: [1 << 62, 1, 1, 0o644]
    sync = synced(master=node)
    with pytest.raises(EngineError, match="stopped before all files were copied"):
        sync.copy_all(3600, requested.is_set)


@pytest.mark.parametrize("piece", [{"offset": 1}, {"offset": 5, "data": "MTIz"}])
def test_a_piece_with_a_wrong_offset_must_be_rejected(folder, synced, piece):
    node = FakeNode()
    node.files, converse = {"good": b"1", "odd": b"123456"}, node.converse
    node.times["odd"] = 0  # it comes first

    def odd(request: Any, answer: type) -> Any:
        reply = converse(request, answer)
        if isinstance(request, protocol.GetChanges) or request.path == "good":
            return reply
        return reply._replace(**(piece if request.offset else {"offset": 3, "data": base64.b64encode(b"1").decode()}))

    node.converse = odd
    sync = synced(master=node)
    assert sync.catch_up(20)
    assert [path.name for path in folder.iterdir()] == ["good"]
    assert "sent bytes at a wrong offset" in str(sync.errors["odd"])


def test_closing_must_not_wait_for_a_node_that_does_not_answer(folder):
    node, requested = FakeNode(), threading.Event()
    node.converse = lambda *_, **facts: (requested.set(), node.ended.wait(), node.dead)[2]  # not an answer
    sync = sync_master(folder, lambda _: node)
    assert requested.wait(20)
    sync.close()
    assert not sync.thread.is_alive() and node.closed


def test_closing_must_not_wait_long_for_a_connection_and_must_leave_it_unused(folder, monkeypatch):
    monkeypatch.setattr(sync_module, "CLOSE_TIMEOUT", 0.01)
    node, gate, requested = FakeNode(), threading.Event(), threading.Event()
    node.converse = lambda *_, **facts: pytest.fail("a request was sent")
    sync = sync_master(folder, lambda _: (requested.set(), gate.wait(), node)[2])
    assert requested.wait(20)
    sync.close()
    assert sync.thread.is_alive()
    gate.set()
    sync.thread.join()
    assert node.closed


def test_files_that_a_node_no_longer_has_must_be_forgotten_while_others_are_copied(folder, monkeypatch):
    clock, node, counts = Clock(), FakeNode(), []
    monkeypatch.setattr(sync_module, "time", clock)
    monkeypatch.setattr(sync_module, "MAX_ENTRIES", 3)
    converse = node.converse

    def slowly(request: Any, answer: type) -> Any:
        if isinstance(request, protocol.GetChanges):  # all files are new, and some are fetched before the next round
            counts.append(len(sync.owners) + len(sync.nodes[0].files))
            node.files = dict.fromkeys((f"{len(counts)}-{each}" for each in range(8)), b"")
        clock.now += sync_module.MAX_TURN / 4 * isinstance(request, protocol.Read)
        return converse(request, answer)

    gate = threading.Event()
    node.converse = slowly
    sync = sync_master(folder, lambda _: gate.wait() and node)
    gate.set()
    try:
        eventually(lambda: len(counts) > 30)
    finally:
        sync.close()
    assert max(counts) < 30 and len(list(folder.iterdir())) < 30


def test_a_path_with_very_many_folders_must_be_skipped_and_named_and_others_copied(folder, synced):
    node, deep = FakeNode(), "d/" * 1100
    node.files = {f"{deep}f": b"1", "d/f": b"2", f"{'d/' * MAX_DEPTH}f": b"3", f"{'x' * 250}/" * 17 + "f": b"4"}
    node.links = {f"{deep}link": "f", "link": "f"}
    sync = synced(master=node)
    assert sync.catch_up(20) and sync.catch_up(20) and not sync.errors
    assert target_of(folder / "link") == "f"
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("f")}
    assert found == {"d/f": b"2", f"{'d/' * MAX_DEPTH}f": b"3"}
    (text,) = sync.warnings()
    assert text.startswith("master: some files are not copied, such as 'd/d/") and len(text) < 200
    assert sync.catch_up(20) and not sync.warnings()


def test_a_name_outside_the_locales_encoding_must_be_skipped_and_named_and_others_copied(folder, synced, monkeypatch):
    def ascii_only(path: object) -> bytes:
        return str(path).encode("ascii")

    monkeypatch.setattr(fetch.os, "fsencode", ascii_only)
    node = FakeNode()
    node.files = {"checkpoint-\N{CJK UNIFIED IDEOGRAPH-4E00}": b"1", "f": b"2"}
    sync = synced(master=node)
    assert sync.catch_up(20) and not sync.errors
    assert (folder / "f").read_bytes() == b"2"
    (text,) = sync.warnings()
    assert "'checkpoint-" in text and "cannot be encoded in this locale" in text


def test_a_file_that_fails_with_any_error_must_not_prevent_others_from_being_copied(folder, synced, monkeypatch):
    node = FakeNode()
    node.files = {"a": b"1", "b": b"2"}
    begin = sync_module.Fetch

    def failing(*facts: Any) -> object:
        if facts[1] == "a":
            raise RecursionError("too deep")
        return begin(*facts)

    monkeypatch.setattr(sync_module, "Fetch", failing)
    sync = synced(master=node)
    assert sync.catch_up(20)
    assert (folder / "b").exists() and list(sync.errors) == ["a"]
    assert sync.errors["a"].__traceback__ is None  # it would keep the last piece of each file in memory
    with pytest.raises(EngineError, match="1 file could not be copied, such as 'a': too deep"):
        sync.copy_all(20)


def test_an_internal_error_must_be_raised_where_files_are_waited_for(folder, monkeypatch):
    def buggy(name: str) -> None:
        raise TypeError("a bug")

    sync = FileSync(folder, "job", {"master": [0]}, buggy)
    for _ in range(2):
        with pytest.raises(TypeError, match="a bug"):
            sync.copy_all(20)
    sync.close()


def test_a_file_with_an_impossible_modification_time_must_be_copied(folder, synced):
    node = FakeNode()
    node.files, node.times = {"late": b"1", "early": b"2"}, {"late": 1 << 95, "early": -(10**9)}
    assert synced(master=node).catch_up(20)
    assert {path.name for path in folder.iterdir()} == {"late", "early"}
    assert (folder / "early").stat().st_mtime == -1


def test_nodes_that_do_not_answer_must_be_reported_as_silent(folder, synced):
    nodes = {"master": FakeNode(), "trainer": FakeNode()}
    nodes["trainer"].dead = True
    sync = synced(**nodes)
    assert sync.catch_up(20) and sync.silent() == {"trainer"}
    nodes["trainer"].dead, nodes["master"].dead = False, True
    assert sync.catch_up(20) and sync.silent() == {"master"}
    assert nodes["master"].closed  # and a new connection is opened


def test_a_partially_copied_file_must_be_removed_when_copying_ends(folder):
    node, read = FakeNode(), threading.Event()
    node.files = {"state.pt": b"1" * PIECE * 3}
    converse = node.converse

    def dies(request: Any, answer: type) -> Any:
        if getattr(request, "offset", 0):
            assert list(folder.glob(".*.coming"))
            read.set()
            raise ConnectionError
        return converse(request, answer)

    node.converse = dies
    sync = sync_master(folder, lambda _: node)
    assert read.wait(20)
    sync.close()
    assert not list(folder.iterdir()) and node.closed and not sync.errors  # not an error of the file


@pytest.fixture
def taken_over(folder, synced):
    """Two nodes with a file of the same name, first copied from the later node, then from the earlier one."""
    master, trainer = FakeNode(), FakeNode()
    trainer.files = {"same": b"trainer"}
    sync = synced(master=master, trainer=trainer)
    assert sync.catch_up(20) and (folder / "same").read_bytes() == b"trainer"
    master.files = {"same": b"master"}
    assert sync.catch_up(20) and (folder / "same").read_bytes() == b"master"
    return master, trainer, sync


def test_the_file_of_an_earlier_node_must_win_whenever_it_is_copied(folder, taken_over):
    master, trainer, sync = taken_over
    trainer.files, trainer.times = {"same": b"later"}, {"same": 3}
    assert sync.catch_up(20) and (folder / "same").read_bytes() == b"master"
    trainer.files = {}
    assert sync.catch_up(20) and (folder / "same").read_bytes() == b"master"


def test_the_file_of_a_later_node_must_be_copied_again_when_there_is_no_other(folder, taken_over):
    master, trainer, sync = taken_over
    master.files = {}
    assert sync.catch_up(20) and sync.catch_up(20)  # one round finds it gone, a later one copies the other
    assert (folder / "same").read_bytes() == b"trainer"
    trainer.files = {}
    assert sync.catch_up(20) and not (folder / "same").exists()


def test_a_file_sent_to_all_nodes_must_be_removed_only_if_the_first_node_has_removed_it(folder, synced):
    for name in ("kept", "removed"):
        (folder / name).touch()
    master, trainer = FakeNode(), FakeNode()
    master.gone, trainer.gone = ["removed"], ["kept"]
    assert synced(master=master, trainer=trainer).catch_up(20)
    assert [path.name for path in folder.iterdir()] == ["kept"]


def test_a_folder_must_be_removed_with_its_last_file_except_the_job_folder(folder, synced):
    node = FakeNode()
    node.files = dict.fromkeys(("a/b/one", "a/two", "three"), b"")
    sync = synced(master=node)
    assert sync.catch_up(20)
    node.files = {"a/two": b""}
    assert sync.catch_up(20)
    assert {str(path.relative_to(folder)) for path in folder.rglob("*")} == {"a", "a/two"}
    node.files = {}
    assert sync.catch_up(20)
    assert folder.is_dir() and not list(folder.iterdir())


def target_of(link: Path) -> str:
    """The target of a link, which each round creates again."""

    def read() -> str:
        with contextlib.suppress(FileNotFoundError):
            return os.readlink(link)
        return ""

    return eventually(read)


def test_links_must_follow_those_of_their_node_and_not_replace_files_of_this_machine(folder, synced):
    (folder / "mine").write_text("ours")
    (folder / "earlier").symlink_to("mine")  # from an earlier supervisor
    node = FakeNode()
    node.files = {"one": b"1", "changing": b"file"}
    node.links = {"sub/last": "one", "mine": "one", "old": "one", "earlier": "one"}
    sync = synced(master=node)
    assert sync.catch_up(20)
    assert target_of(folder / "sub/last") == "one" and target_of(folder / "old") == "one"
    assert target_of(folder / "earlier") == "one"
    assert (folder / "mine").read_text() == "ours" and not (folder / "mine").is_symlink()
    node.links = {"sub/last": "two", "changing": "one"}
    del node.files["changing"]
    assert sync.catch_up(20)
    assert target_of(folder / "sub/last") == "two" and not (folder / "old").is_symlink()
    assert target_of(folder / "changing") == "one"


def test_a_file_that_comes_back_unchanged_must_be_copied_again(folder, synced):
    node, files = FakeNode(), {"state.pt": b"1"}
    node.files = files
    sync = synced(master=node)
    assert sync.catch_up(20)
    node.files = {}  # renamed to a hidden name, for example
    assert sync.catch_up(20) and not list(folder.iterdir())
    node.files = files
    assert sync.catch_up(20) and (folder / "state.pt").exists()


def test_a_log_must_be_copied_to_its_last_piece_before_catch_up_returns(folder, synced):
    node = FakeNode()
    (folder / "logs").mkdir()
    node.logs = {"logs/rank-0.log": b"0123456789" * 50}  # each round copies ten bytes
    assert synced(master=node).catch_up(20)
    assert (folder / "logs" / "rank-0.log").read_bytes() == b"0123456789" * 50


def test_the_orchestrators_own_files_in_the_job_folder_must_be_listed():
    paths = JobPaths(Path("job"))
    ours = {paths.spec, paths.plan, paths.events, paths.report, paths.fence, paths.lock}
    ours |= {paths.supervisor_log}
    assert {str(path.relative_to(paths.shared)) for path in ours if path.is_relative_to(paths.shared)} == OWN


def test_logs_must_be_copied_while_a_large_file_is_fetched(folder, monkeypatch):
    clock, node, kinds = Clock(), FakeNode(), []
    monkeypatch.setattr(sync_module, "time", clock)
    node.files = {"large": b"x" * PIECE * 4}
    converse = node.converse

    def slowly(request: Any, answer: type) -> Any:
        kinds.append(type(request))
        clock.now += sync_module.MAX_TURN * isinstance(request, protocol.Read)
        return converse(request, answer)

    node.converse = slowly
    sync = sync_master(folder, lambda _: node)
    try:
        assert sync.catch_up(20) and (folder / "large").stat().st_size == PIECE * 4  # all of it, though it takes long
        assert kinds[:8] == [protocol.GetChanges, protocol.Read] * 4
    finally:
        sync.close()


def test_a_file_that_a_node_has_replaced_must_be_kept_until_the_new_one_is_copied(folder, monkeypatch):
    clock, node, existed = Clock(), FakeNode(), []
    monkeypatch.setattr(sync_module, "time", clock)
    monkeypatch.setattr(sync_module, "SYNC_INTERVAL", 0.01)
    node.files = {"step-1": b"old"}
    converse = node.converse

    def slowly(request: Any, answer: type) -> Any:
        clock.now += sync_module.MAX_TURN * isinstance(request, protocol.Read)
        existed.append((folder / "step-1").exists())
        return converse(request, answer)

    node.converse = slowly
    sync = sync_master(folder, lambda _: node)
    try:
        assert sync.catch_up(20)
        node.files, count = {"step-2": b"x" * PIECE * 3}, len(existed)
        assert sync.catch_up(20)
        assert all(existed[count : count + 6]) and [path.name for path in folder.iterdir()] == ["step-2"]
    finally:
        sync.close()
