"""Which files of nodes are copied to this machine and which are not, with fake nodes."""

import base64
import itertools
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from support.scripted import Clock
from support.synced import FakeNode, sync_master, target_of
from support.waiting import eventually

from orchestrate.engines.swarm import sync as sync_module
from orchestrate.engines.swarm.sync import OWN
from orchestrate.node.files import PIECE
from orchestrate.node.messages import protocol
from orchestrate.record.paths import JobPaths


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


@pytest.mark.parametrize("here", [b"", b"1" * 10, b"0" * 10])
def test_a_file_that_always_grows_must_be_copied_but_not_a_mixture_of_an_old_one_and_a_new_one(folder, synced, here):
    node = FakeNode()
    node.files = {"log": b"1" * (PIECE + 1)}
    if here:
        (folder / "log").write_bytes(here)
    converse = node.converse

    def growing(request: Any, answer: type, **_: object) -> Any:
        found = converse(request, answer)
        if isinstance(request, protocol.Read):
            node.files["log"], node.times["log"] = node.files["log"] + b"1", node.times.get("log", 1) + 1
            found = found._replace(facts=node.facts("log"))
        return found

    node.converse = growing
    sync = synced(master=node)
    for _ in range(2):
        assert sync.catch_up(20) and not sync.errors
    copied = (folder / "log").read_bytes()
    assert copied == here if here[:1] == b"0" else len(copied) > PIECE and {*copied} == {ord("1")}


def test_what_was_written_last_must_be_copied_last(folder, synced):
    """For example, a manifest after the data that it names: the node may be lost at any moment."""
    node = FakeNode()
    node.files = {"manifest": b"a, b", "b": b"2", "a": b"1"}
    node.times = {"manifest": 30, "b": 20, "a": 10}
    assert synced(master=node).catch_up(20)
    assert node.requests == ["a", "b", "manifest"]


def test_a_file_with_a_long_name_must_be_copied(folder, synced):
    node = FakeNode()
    node.files = {"x" * 250: b"1", f"{'x' * 249}y": b"2"}
    sync = synced(master=node)
    assert sync.catch_up(20) and not sync.errors
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == node.files


@pytest.mark.parametrize("piece", [{"offset": 1}, {"offset": 5, "data": "MTIz"}])
def test_a_piece_with_a_wrong_offset_must_be_rejected(folder, synced, piece):
    node = FakeNode()
    node.files, converse = {"good": b"1", "odd": b"123456"}, node.converse
    node.times["odd"] = 0  # it comes first

    def odd(request: Any, answer: type, **_: object) -> Any:
        reply = converse(request, answer)
        if isinstance(request, protocol.GetChanges) or request.path == "good":
            return reply
        return reply._replace(**(piece if request.offset else {"offset": 3, "data": base64.b64encode(b"1").decode()}))

    node.converse = odd
    sync = synced(master=node)
    assert sync.catch_up(20)
    assert [path.name for path in folder.iterdir()] == ["good"]
    assert "sent bytes at a wrong offset" in str(sync.errors["odd"])


def test_files_that_a_node_no_longer_has_must_be_forgotten_while_others_are_copied(folder, monkeypatch):
    clock, node, counts = Clock(), FakeNode(), []
    monkeypatch.setattr(sync_module, "MAX_ENTRIES", 3)
    converse = node.converse

    def slowly(request: Any, answer: type, **_: object) -> Any:
        if isinstance(request, protocol.GetChanges):  # all files are new, and some are fetched before the next round
            counts.append(len(sync.owners.by_path) + len(sync.nodes[0].files))
            node.files = dict.fromkeys((f"{len(counts)}-{each}" for each in range(8)), b"")
        clock.now += sync_module.MAX_TURN / 4 * isinstance(request, protocol.Read)
        return converse(request, answer)

    gate = threading.Event()
    node.converse = slowly
    sync = sync_master(folder, lambda _: gate.wait() and node, clock)
    gate.set()
    try:
        eventually(lambda: len(counts) > 30)
    finally:
        sync.close()
    assert max(counts) < 30 and len(list(folder.iterdir())) < 30


def test_a_file_with_an_impossible_modification_time_must_be_copied(folder, synced):
    node = FakeNode()
    node.files, node.times = {"late": b"1", "early": b"2"}, {"late": 1 << 95, "early": -(10**9)}
    assert synced(master=node).catch_up(20)
    assert {path.name for path in folder.iterdir()} == {"late", "early"}
    assert (folder / "early").stat().st_mtime == -1


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


def test_a_file_that_an_earlier_node_has_must_win_although_another_is_being_fetched(folder, synced):
    clock, master, trainer = Clock(), FakeNode(), FakeNode()
    trainer.files, converse = {"same": b"x" * PIECE * 5}, trainer.converse
    sync = synced(clock, master=master, trainer=trainer)

    def slowly(request: Any, answer: type, **_: object) -> Any:
        if isinstance(request, protocol.Read):  # one piece in each round
            master.files, rounds = {"same": b"master"}, sync.nodes[0].looks
            eventually(lambda: sync.nodes[0].looks > rounds + 1)
            clock.now += sync_module.MAX_TURN
        return converse(request, answer)

    trainer.converse = slowly
    sync.copy_all(20)
    assert len(trainer.requests) < 5 and (folder / "same").read_bytes() == b"master"


def test_a_file_that_an_earlier_node_has_must_win_although_another_arrives_later(folder, synced):
    master, trainer, reading = FakeNode(), FakeNode(), threading.Event()
    master.files, trainer.files = {"same": b"master"}, {"same": b"trainer"}
    first, second = master.converse, trainer.converse

    def after(request: Any, answer: type, **_: object) -> Any:
        assert reading.wait(20)
        return first(request, answer)

    def slowly(request: Any, answer: type, **_: object) -> Any:
        if isinstance(request, protocol.Read):
            reading.set()
            assert eventually((folder / "same").exists)
        return second(request, answer)

    master.converse, trainer.converse = after, slowly
    synced(master=master, trainer=trainer).copy_all(20)
    assert (folder / "same").read_bytes() == b"master"


def test_a_file_that_moves_to_an_earlier_node_must_be_kept(folder, synced):
    master, trainer, pass_, moving = FakeNode(), FakeNode(), threading.Barrier(2), threading.Event()
    trainer.files = {"same": b"trainer"}
    first, second = master.converse, trainer.converse

    class Files(dict):
        def pop(self, *arguments: Any) -> Any:  # called when the file is gone from the later node
            if not moving.is_set():
                master.files = {"same": b"master"}
                moving.set()
                assert eventually(lambda: (folder / "same").read_bytes() == b"master")
            return super().pop(*arguments)

    def after(request: Any, answer: type, **_: object) -> Any:
        if isinstance(request, protocol.GetChanges) and not moving.is_set():
            pass_.wait(20)
            assert trainer.files or moving.wait(20)
        return first(request, answer)

    def before(request: Any, answer: type, **_: object) -> Any:
        if isinstance(request, protocol.GetChanges) and not moving.is_set():
            if (folder / "same").exists():
                sync.nodes[1].files, trainer.files = Files(sync.nodes[1].files), {}
            pass_.wait(20)
        return second(request, answer)

    master.converse, trainer.converse = after, before
    sync = synced(master=master, trainer=trainer)
    assert moving.wait(20) and sync.catch_up(20)
    assert (folder / "same").read_bytes() == b"master"


def test_files_that_are_written_without_end_must_not_hold_up_a_round(folder, synced):
    """As by a process that a job has left."""
    node, number = FakeNode(), itertools.count()
    node.files, node.logs = {"touched": b"old"}, {"logs/rank-0.log": b"1"}
    (folder / "logs").mkdir()
    clock, converse = Clock(), node.converse

    def writing(request: Any, answer: type, **_: object) -> Any:
        clock.now += 1  # more than a turn
        if isinstance(request, protocol.Read):
            node.times["touched"] = time = next(number)
            node.files[f"new-{time}"] = b"new"
        node.logs["logs/rank-0.log"] += b"1"
        return converse(request, answer)

    node.converse = writing
    sync = synced(clock, master=node)
    for _ in range(3):
        assert sync.catch_up(1000)
    assert (folder / "new-0").exists()


def test_a_file_and_a_folder_must_be_able_to_replace_each_other(folder, synced):
    node = FakeNode()
    sync = synced(master=node)
    for files in ({"a": b"1", "b/c": b"2"}, {"a/d": b"3", "b": b"4"}):
        node.files = files
        assert sync.catch_up(20) and not sync.errors
        found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        assert found == files


def test_a_file_must_have_its_full_size_and_stay_executable_although_it_ends_with_a_hole(folder, synced):
    node = FakeNode()
    node.files, node.facts = {"sparse": b"data"}, lambda path: [100, 1, 1, 0o744]
    assert synced(master=node).catch_up(20)
    assert (folder / "sparse").read_bytes() == b"data" + bytes(96)
    assert (folder / "sparse").stat().st_mode & 0o100


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


def test_logs_must_be_copied_while_a_large_file_is_fetched(folder):
    clock, node, kinds = Clock(), FakeNode(), []
    node.files = {"large": b"x" * PIECE * 4}
    converse = node.converse

    def slowly(request: Any, answer: type, **_: object) -> Any:
        kinds.append(type(request))
        if isinstance(request, protocol.Read) and request.offset < 3 * PIECE:
            clock.now += sync_module.MAX_TURN
        return converse(request, answer)

    node.converse = slowly
    sync = sync_master(folder, lambda _: node, clock)
    try:
        assert sync.catch_up(20) and (folder / "large").stat().st_size == PIECE * 4  # all of it, though it takes long
        assert kinds[:8] == [protocol.GetChanges, protocol.Read] * 4 and kinds.count(protocol.Read) == 4
    finally:
        sync.close()


def test_a_file_that_a_node_has_replaced_must_be_kept_until_the_new_one_is_copied(folder, monkeypatch):
    clock, node, existed = Clock(), FakeNode(), []
    monkeypatch.setattr(sync_module, "SYNC_INTERVAL", 0.01)
    node.files = {"step-1": b"old"}
    converse = node.converse

    def slowly(request: Any, answer: type, **_: object) -> Any:
        clock.now += sync_module.MAX_TURN * isinstance(request, protocol.Read)
        existed.append((folder / "step-1").exists())
        return converse(request, answer)

    node.converse = slowly
    sync = sync_master(folder, lambda _: node, clock)
    try:
        assert sync.catch_up(20)
        node.files, count = {"step-2": b"x" * PIECE * 3}, len(existed)
        assert sync.catch_up(20)
        assert all(existed[count : count + 6]) and [path.name for path in folder.iterdir()] == ["step-2"]
    finally:
        sync.close()
