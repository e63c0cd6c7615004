"""Files that cannot be copied from a node, and copying that is ended; with fake nodes."""

import base64
import errno
import os
import threading
from typing import Any

import pytest
from support.scripted import Clock
from support.synced import FakeNode, sync_master, target_of
from support.waiting import eventually

from orchestrate.engines.swarm import fetch
from orchestrate.engines.swarm import sync as sync_module
from orchestrate.engines.swarm.sync import FileSync
from orchestrate.errors import EngineError
from orchestrate.files.folder import MAX_DEPTH, Folder
from orchestrate.node.files import PIECE
from orchestrate.node.messages import protocol


def test_a_file_that_cannot_be_read_must_be_retried_only_after_a_while_or_a_change(folder, synced):
    clock, node = Clock(), FakeNode()
    node.files, node.refused = {"bad": b"1", "good": b"2"}, {"bad"}
    converse = node.converse

    def later(request: Any, answer: type, **_: object) -> Any:
        clock.now += 0.001
        return converse(request, answer)

    node.converse = later
    sync = synced(clock, master=node)

    def attempts() -> int:
        """How often the file is requested in four rounds."""
        (master,) = sync.nodes
        before, rounds = node.requests.count("bad"), master.looks
        while master.looks < rounds + 4:
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
    monkeypatch.setattr(sync_module, "SYNC_INTERVAL", 0.01)
    sync, began = sync_master(folder, lambda _: gate.wait() and None, clock), clock.now
    try:
        assert not sync.catch_up(0, lambda: clock.now > began + 100)
        assert not sync.catch_up(100, lambda: True)
        with pytest.raises(EngineError, match="not all files were copied from the nodes in time"):
            sync.copy_all(0)
        assert clock.now < began + 20
    finally:
        gate.set()
        sync.close()
    assert sync.catch_up(100)  # nothing more is copied


def test_the_wait_for_files_must_be_interruptible(folder, synced):
    node, requested = FakeNode(), threading.Event()
    node.files, converse = {"endless": b"1"}, node.converse

    def endless(request: Any, answer: type, **_: object) -> Any:
        requested.set()
        reply = converse(request, answer)
        if isinstance(request, protocol.GetChanges):
            return reply
        return reply._replace(data=base64.b64encode(b"1").decode(), offset=request.offset)

    node.converse, node.facts = endless, lambda path: [1 << 62, 1, 1, 0o644]
    sync = synced(master=node)
    with pytest.raises(EngineError, match="stopped before all files were copied"):
        sync.copy_all(3600, requested.is_set)


def test_closing_must_not_wait_for_a_node_that_does_not_answer(folder):
    node, requested = FakeNode(), threading.Event()
    node.converse = lambda *_, **facts: (requested.set(), node.ended.wait(), node.dead)[2]  # not an answer
    sync = sync_master(folder, lambda _: node)
    assert requested.wait(20)
    sync.close()
    assert not any(thread.is_alive() for thread in sync.threads) and node.closed


def test_closing_must_not_wait_long_for_a_connection_and_must_leave_it_unused(folder, monkeypatch):
    monkeypatch.setattr(sync_module, "CLOSE_TIMEOUT", 0.01)
    node, gate, requested = FakeNode(), threading.Event(), threading.Event()
    node.converse = lambda *_, **facts: pytest.fail("a request was sent")
    sync = sync_master(folder, lambda _: (requested.set(), gate.wait(), node)[2])
    assert requested.wait(20)
    sync.close()
    (thread,) = sync.threads
    assert thread.is_alive()
    gate.set()
    thread.join()
    assert node.closed


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
    assert text.startswith("master: some files are not copied, such as 'd/d/") and len(text) < 250
    assert sync.catch_up(20) and not sync.warnings() and not sync.warnings()


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


def test_an_internal_error_must_be_raised_where_files_are_waited_for(folder):
    """As one of the engine: the job ends with a report."""

    def buggy(name: str) -> None:
        raise TypeError("a bug")

    sync = FileSync(folder, "job", {"master": [0]}, buggy)
    for _ in range(2):
        with pytest.raises(EngineError, match="files of nodes are not copied anymore: TypeError"):
            sync.copy_all(20)
    sync.close()


def test_nodes_that_do_not_answer_must_be_reported_as_silent(folder, synced):
    nodes = {"master": FakeNode(), "trainer": FakeNode()}
    nodes["trainer"].dead = True
    sync = synced(**nodes)
    assert sync.catch_up(20) and sync.silent() == {"trainer"}
    nodes["trainer"].dead, nodes["master"].dead = False, True
    assert sync.catch_up(20) and sync.silent() == {"master"}
    assert nodes["master"].closed  # and a new connection is opened


def test_a_node_that_answers_again_while_others_are_waited_for_must_be_waited_for_too(folder, synced):
    master, trainer, begun = FakeNode(), FakeNode(), threading.Event()
    of_master, of_trainer = master.converse, trainer.converse

    def waits(request: Any, answer: type, **_: object) -> Any:
        if isinstance(request, protocol.Read):
            begun.wait(20)
        return of_trainer(request, answer)

    def late(request: Any, answer: type, **_: object) -> Any:
        reply = of_master(request, answer)
        if isinstance(request, protocol.Read):
            begun.set()  # from here on, the trainer is done
            rounds = sync.nodes[1].looks
            eventually(lambda: sync.nodes[1].looks > rounds + 20)
        return reply

    master.converse, trainer.converse = late, waits
    sync = synced(master=master, trainer=trainer)
    master.dead, master.files, trainer.files = True, {"a": b"1", "b": b"2"}, {"t": b"1"}
    rounds = sync.nodes[0].looks

    def silent_for_a_while() -> bool:
        master.dead = master.dead and sync.nodes[0].looks < rounds + 5
        return False

    assert sync.catch_up(60, silent_for_a_while)
    assert {path.name for path in folder.iterdir()} == {"a", "b", "t"} and not sync.silent()


@pytest.mark.parametrize("earlier", ["link", "file"])
def test_a_folder_in_place_of_an_earlier_link_or_file_must_be_copied(folder, synced, earlier):
    """As after a restart: no node lists what it has not changed."""
    (folder / "step-1").mkdir()
    (folder / "latest").symlink_to("step-1") if earlier == "link" else (folder / "latest").write_text("0")
    nodes = {"master": FakeNode(), "trainer": FakeNode()}
    nodes["trainer"].files = {"latest/m": b"1", "latest/deep/n": b"2"}
    sync = synced(**nodes)
    sync.copy_all(20)
    assert not (folder / "latest").is_symlink() and not list((folder / "step-1").iterdir())
    assert [(folder / path).read_bytes() for path in ("latest/m", "latest/deep/n")] == [b"1", b"2"]


def test_a_folder_of_a_later_node_must_not_replace_a_file_of_an_earlier_one(folder, synced):
    nodes = {"master": FakeNode(), "trainer": FakeNode()}
    nodes["master"].files, nodes["trainer"].files = {"best": b"1"}, {"best/m": b"2"}
    sync = synced(**nodes)
    eventually(lambda: sync.catch_up(20) and not sync.failed() and (folder / "best").is_file())
    sync.copy_all(20)
    assert (folder / "best").read_bytes() == b"1"


def test_a_file_that_another_node_writes_again_must_not_be_removed_with_the_old_one(folder, synced):
    (folder / "latest").mkdir()
    nodes = {"master": FakeNode(), "trainer": FakeNode()}
    nodes["master"].gone = ["latest/shard-1", "old"]  # of an earlier generation
    (folder / "old").write_text("0")
    nodes["trainer"].files = {"latest/shard-1": b"1", "other": b"2"}
    sync = synced(**nodes)
    for _ in range(10):
        assert sync.catch_up(20)
    assert (folder / "latest" / "shard-1").read_bytes() == b"1" and not (folder / "old").exists()
    assert nodes["trainer"].requests.count("latest/shard-1") <= 2  # it may come before its node has claimed it


def test_what_could_not_be_copied_must_be_reported_until_it_is(folder, synced):
    node, log = FakeNode(), folder / "logs" / "rank-0.log"
    node.files, node.logs = {"bad": b"1", "covered": b"3"}, {"logs/rank-0.log": b"2"}
    node.refused = {"bad"}
    log.parent.mkdir()
    (folder / "covered").mkdir()  # in the way of a file
    log.symlink_to("gone")  # it must not be followed
    sync = synced(master=node)
    with pytest.raises(EngineError, match="^3 files could not be copied"):
        sync.copy_all(20)
    node.refused.clear(), log.unlink(), (folder / "covered").rmdir()
    sync.copy_all(20)
    assert [path.read_bytes() for path in (folder / "bad", log, folder / "covered")] == [b"1", b"2", b"3"]


def test_what_a_killed_supervisor_has_left_must_not_prevent_a_copy(folder, synced):
    for name in ("state.pt", "last"):
        fetch.Fetch(Folder(folder.parent, folder.name), name, [1, 1, 1, 0o644], "master").file.close()
    node = FakeNode()
    node.files, node.links = {"state.pt": b"1"}, {"last": "state.pt"}
    assert synced(master=node).catch_up(20)
    assert target_of(folder / "last") == "state.pt" and {path.name for path in folder.iterdir()} == {"state.pt", "last"}


def test_a_node_must_not_lose_its_copy_to_another_node_that_sends_the_same_file(folder):
    here = Folder(folder.parent, folder.name)
    first, second = (fetch.Fetch(here, "same", [1, 1, 1, 0o644], node) for node in ("master", "trainer-1"))
    second.write(b"2", 0), second.keep(), second.drop()
    first.write(b"1", 0), first.keep()
    assert [(path.name, path.read_bytes()) for path in folder.iterdir()] == [("same", b"1")]


def test_a_partially_copied_file_must_be_removed_when_copying_ends(folder):
    node, read = FakeNode(), threading.Event()
    node.files = {"state.pt": b"1" * PIECE * 3}
    converse = node.converse

    def dies(request: Any, answer: type, **_: object) -> Any:
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
