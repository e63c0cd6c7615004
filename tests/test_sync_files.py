"""Which files of nodes are brought home and which are let be; the nodes' answers are the test's."""

import base64
import contextlib
import errno
import os
import threading
from pathlib import Path

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


class Told:
    """A connection to a node that has these files."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.times: dict[str, int] = {}
        self.links: dict[str, str] = {}
        self.gone: list[str] = []
        self.logs: dict[str, bytes] = {}
        self.refused: set[str] = set()
        self.asked: list[str] = []
        self.changes: dict[str, bytes] = {}  # files that are written while they are read
        self.closed = self.dead = False
        self.ended = threading.Event()

    def facts(self, path: str) -> list[int]:
        return [len(self.files[path]), self.times.get(path, 1), 1, 0o644]

    def converse(self, request: protocol.GetChanges | protocol.Read, answer: type) -> protocol.Report:
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
        self.asked.append(path)
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


@pytest.fixture
def home(tmp_path):
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


@pytest.fixture
def synced(home, monkeypatch):
    """What brings home the files of nodes, by their names."""
    monkeypatch.setattr(sync_module, "SYNC_INTERVAL", 0.01)
    made: list[FileSync] = []

    def bring(**nodes: Told) -> FileSync:
        ranks = {name: [rank] for rank, name in enumerate(nodes)}
        made.append(FileSync(home, "job", ranks, lambda name: nodes[name]))
        return made[-1]

    yield bring
    for sync in made:
        sync.close()


def test_a_file_must_be_fetched_once_and_again_when_it_has_changed(home, synced):
    node = Told()
    node.files, node.times = {"a/b/state.pt": b"1"}, {"a/b/state.pt": 10**18 + 7}
    sync = synced(master=node)
    for _ in range(2):
        assert sync.catch_up(20)
    assert node.asked == ["a/b/state.pt"] and (home / "a/b/state.pt").stat().st_mtime_ns == 10**18 + 7
    node.files["a/b/state.pt"], node.times["a/b/state.pt"] = b"2", 10**18 + 8
    assert sync.catch_up(20)
    assert node.asked == ["a/b/state.pt"] * 2 and (home / "a/b/state.pt").read_bytes() == b"2"


@pytest.mark.parametrize(("content", "time", "asked"), [(b"old", 5, 0), (b"old", 6, 1), (b"older", 5, 1)])
def test_what_an_earlier_supervisor_has_brought_must_not_be_fetched_again(home, synced, content, time, asked):
    (home / "state.pt").write_bytes(b"old")
    os.utime(home / "state.pt", ns=(5, 5))
    node = Told()
    node.files, node.times = {"state.pt": content}, {"state.pt": time}
    assert synced(master=node).catch_up(20)
    assert len(node.asked) == asked and (home / "state.pt").read_bytes() == content


def test_a_file_that_is_written_while_it_is_fetched_must_come_home_as_it_is_then(home, synced):
    node = Told()
    node.files, node.changes = {"state.pt": b"1" * (PIECE + 1)}, {"state.pt": b"2" * 3}
    sync = synced(master=node)
    assert sync.catch_up(20) and not sync.errors
    assert (home / "state.pt").read_bytes() == b"222" and len(node.asked) == 2
    assert [path.name for path in home.iterdir()] == ["state.pt"]  # and nothing half


def test_a_file_with_a_long_name_must_come_home(home, synced):
    node = Told()
    node.files = {"x" * 250: b"1", f"{'x' * 249}y": b"2"}
    sync = synced(master=node)
    assert sync.catch_up(20) and not sync.errors
    assert {path.name: path.read_bytes() for path in home.iterdir()} == node.files


def test_a_file_that_cannot_be_had_must_be_tried_again_only_when_it_may_be(home, synced, monkeypatch):
    clock, node = Clock(), Told()
    monkeypatch.setattr(sync_module, "time", clock)
    node.files, node.refused = {"bad": b"1", "good": b"2"}, {"bad"}
    converse = node.converse

    def later(request: protocol.Request, answer: type) -> protocol.Report:
        clock.now += 0.001
        return converse(request, answer)

    node.converse = later
    sync = synced(master=node)

    def tried() -> int:
        """How often it is asked for in some looks."""
        before, looks = node.asked.count("bad"), sync.looks
        while sync.looks < looks + 4:
            with sync.changed:
                sync.changed.wait(1)
        return node.asked.count("bad") - before

    assert sync.catch_up(20)
    assert tried() == 0 and node.asked.count("good") == 1
    with pytest.raises(EngineError, match="1 file could not be copied, such as 'bad': node error: it cannot be read"):
        sync.come_home(20)  # which has it tried
    assert node.asked.count("bad") > 1
    clock.now += sync_module.RETRY_INTERVAL + 0.1
    assert tried() == 1
    node.times["bad"] = 9  # it is another one
    assert tried() == 1
    del node.files["bad"]
    sync.come_home(20)
    assert not sync.errors


@pytest.mark.parametrize(("number", "full"), [(errno.ENOSPC, True), (errno.EDQUOT, True), (errno.EACCES, False)])
def test_a_full_disk_must_be_told_apart_from_other_errors(synced, number, full):
    sync = synced(master=Told())
    sync.errors = {"a": EngineError("x"), "b": OSError(number, os.strerror(number))}
    if not full:
        return sync.lacks_space()
    with pytest.raises(OSError) as raised:
        sync.lacks_space()
    assert (raised.value.errno, raised.value.filename) == (number, "b")


def test_files_must_not_be_waited_for_longer_than_was_asked_for(home, monkeypatch):
    class Ticking(Clock):
        """Time of which a second passes with each look at it."""

        def monotonic(self) -> float:
            self.now += 1
            return self.now

    gate, clock = threading.Event(), Ticking()
    monkeypatch.setattr(sync_module, "time", clock)
    monkeypatch.setattr(sync_module, "SYNC_INTERVAL", 0.01)
    sync, began = FileSync(home, "job", {"master": [0]}, lambda _: gate.wait() and None), clock.now
    try:
        assert not sync.catch_up(0, lambda: clock.now > began + 100)
        assert not sync.catch_up(100, lambda: True)
        with pytest.raises(EngineError, match="not all files were copied from the nodes within 0 s"):
            sync.come_home(0)
        assert clock.now < began + 20
    finally:
        gate.set()
        sync.close()
    assert sync.catch_up(100)  # nothing more comes


def test_files_must_not_be_waited_for_once_that_is_no_longer_wanted(home, synced):
    node, asked = Told(), threading.Event()
    node.files, converse = {"endless": b"1"}, node.converse

    def endless(request: protocol.Request, answer: type) -> protocol.Report:
        asked.set()
        told = converse(request, answer)
        if isinstance(request, protocol.GetChanges):
            return told
        return told._replace(data=base64.b64encode(b"1").decode(), offset=request.offset)

    node.converse, node.facts = endless, lambda path: [1 << 62, 1, 1, 0o644]
    sync = synced(master=node)
    with pytest.raises(EngineError, match="stopped before all files were copied"):
        sync.come_home(3600, asked.is_set)


@pytest.mark.parametrize("piece", [{"offset": 1}, {"offset": 5, "data": "MTIz"}])
def test_a_piece_that_is_out_of_place_must_not_be_taken(home, synced, piece):
    node = Told()
    node.files, converse = {"good": b"1", "odd": b"123456"}, node.converse
    node.times["odd"] = 0  # it comes first

    def odd(request: protocol.Request, answer: type) -> protocol.Report:
        told = converse(request, answer)
        if isinstance(request, protocol.GetChanges) or request.path == "good":
            return told
        return told._replace(**(piece if request.offset else {"offset": 3, "data": base64.b64encode(b"1").decode()}))

    node.converse = odd
    sync = synced(master=node)
    assert sync.catch_up(20)
    assert [path.name for path in home.iterdir()] == ["good"]
    assert "sent bytes at a wrong offset" in str(sync.errors["odd"])


def test_the_end_must_not_wait_for_a_node_that_does_not_answer(home):
    node, asked = Told(), threading.Event()
    node.converse = lambda *_, **facts: (asked.set(), node.ended.wait(), node.dead)[2]  # which is no answer
    sync = FileSync(home, "job", {"master": [0]}, lambda _: node)
    assert asked.wait(20)
    sync.close()
    assert not sync.thread.is_alive() and node.closed


def test_the_end_must_not_wait_for_long_for_a_connection_which_is_then_not_used(home, monkeypatch):
    monkeypatch.setattr(sync_module, "CLOSE_TIMEOUT", 0.01)
    node, gate, asked = Told(), threading.Event(), threading.Event()
    node.converse = lambda *_, **facts: pytest.fail("it is not to be asked")
    sync = FileSync(home, "job", {"master": [0]}, lambda _: (asked.set(), gate.wait(), node)[2])
    assert asked.wait(20)
    sync.close()
    assert sync.thread.is_alive()
    gate.set()
    sync.thread.join()
    assert node.closed


def test_what_a_node_no_longer_has_must_be_forgotten_while_others_come(home, monkeypatch):
    clock, node, owned = Clock(), Told(), []
    monkeypatch.setattr(sync_module, "time", clock)
    monkeypatch.setattr(sync_module, "MAX_ENTRIES", 3)
    converse = node.converse

    def slowly(request: protocol.Request, answer: type) -> protocol.Report:
        if isinstance(request, protocol.GetChanges):  # files are all new: some are fetched before the next look
            owned.append(len(sync.owners) + len(sync.nodes[0].files))
            node.files = dict.fromkeys((f"{len(owned)}-{each}" for each in range(8)), b"")
        clock.now += sync_module.MAX_TURN / 4 * isinstance(request, protocol.Read)
        return converse(request, answer)

    gate = threading.Event()
    node.converse = slowly
    sync = FileSync(home, "job", {"master": [0]}, lambda _: gate.wait() and node)
    gate.set()
    try:
        eventually(lambda: len(owned) > 30)
    finally:
        sync.close()
    assert max(owned) < 30 and len(list(home.iterdir())) < 30


def test_a_path_of_very_many_folders_must_be_left_and_named_and_others_come(home, synced):
    node, deep = Told(), "d/" * 1100
    node.files = {f"{deep}f": b"1", "d/f": b"2", f"{'d/' * MAX_DEPTH}f": b"3", f"{'x' * 250}/" * 17 + "f": b"4"}
    node.links = {f"{deep}link": "f", "link": "f"}
    sync = synced(master=node)
    assert sync.catch_up(20) and sync.catch_up(20) and not sync.errors
    assert leads(home / "link") == "f"
    found = {str(path.relative_to(home)): path.read_bytes() for path in home.rglob("f")}
    assert found == {"d/f": b"2", f"{'d/' * MAX_DEPTH}f": b"3"}
    (text,) = sync.warnings()
    assert text.startswith("master: some files are not copied, such as 'd/d/") and len(text) < 200
    assert sync.catch_up(20) and not sync.warnings()


def test_a_name_that_this_locale_does_not_have_must_be_left_and_named_and_others_come(home, synced, monkeypatch):
    def ascii_alone(path: object) -> bytes:
        return str(path).encode("ascii")

    monkeypatch.setattr(fetch.os, "fsencode", ascii_alone)
    node = Told()
    node.files = {"checkpoint-\N{CJK UNIFIED IDEOGRAPH-4E00}": b"1", "f": b"2"}
    sync = synced(master=node)
    assert sync.catch_up(20) and not sync.errors
    assert (home / "f").read_bytes() == b"2"
    (text,) = sync.warnings()
    assert "'checkpoint-" in text and "cannot be encoded in this locale" in text


def test_a_file_that_fails_in_any_way_must_not_keep_others_away(home, synced, monkeypatch):
    node = Told()
    node.files = {"a": b"1", "b": b"2"}
    begin = sync_module.Fetch

    def failing(*facts: object) -> object:
        if facts[1] == "a":
            raise RecursionError("too deep")
        return begin(*facts)

    monkeypatch.setattr(sync_module, "Fetch", failing)
    sync = synced(master=node)
    assert sync.catch_up(20)
    assert (home / "b").exists() and list(sync.errors) == ["a"]
    assert sync.errors["a"].__traceback__ is None  # it would keep the piece that was read last, of each file
    with pytest.raises(EngineError, match="1 file could not be copied, such as 'a': too deep"):
        sync.come_home(20)


def test_a_mistake_of_ours_must_reach_who_waits_for_files(home, monkeypatch):
    def mistaken(name: str) -> None:
        raise TypeError("a bug")

    sync = FileSync(home, "job", {"master": [0]}, mistaken)
    for _ in range(2):
        with pytest.raises(TypeError, match="a bug"):
            sync.come_home(20)
    sync.close()


def test_a_file_of_a_time_that_there_is_not_must_come_home(home, synced):
    node = Told()
    node.files, node.times = {"late": b"1", "early": b"2"}, {"late": 1 << 95, "early": -(10**9)}
    assert synced(master=node).catch_up(20)
    assert {path.name for path in home.iterdir()} == {"late", "early"}
    assert (home / "early").stat().st_mtime == -1


def test_nodes_that_do_not_answer_must_be_known(home, synced):
    nodes = {"master": Told(), "trainer": Told()}
    nodes["trainer"].dead = True
    sync = synced(**nodes)
    assert sync.catch_up(20) and sync.silent() == {"trainer"}
    nodes["trainer"].dead, nodes["master"].dead = False, True
    assert sync.catch_up(20) and sync.silent() == {"master"}
    assert nodes["master"].closed  # and a new connection is made


def test_what_has_half_come_home_must_be_removed_when_no_more_is_brought(home):
    node, read = Told(), threading.Event()
    node.files = {"state.pt": b"1" * PIECE * 3}
    converse = node.converse

    def dies(request: protocol.Request, answer: type) -> protocol.Report:
        if getattr(request, "offset", 0):
            assert list(home.glob(".*.coming"))
            read.set()
            raise ConnectionError
        return converse(request, answer)

    node.converse = dies
    sync = FileSync(home, "job", {"master": [0]}, lambda _: node)
    assert read.wait(20)
    sync.close()
    assert not list(home.iterdir()) and node.closed and not sync.errors  # of which the file knows nothing


@pytest.fixture
def taken_over(home, synced):
    """Two nodes with files of one name, of which the later one's came first, and what brings them home."""
    master, trainer = Told(), Told()
    trainer.files = {"same": b"trainer"}
    sync = synced(master=master, trainer=trainer)
    assert sync.catch_up(20) and (home / "same").read_bytes() == b"trainer"
    master.files = {"same": b"master"}
    assert sync.catch_up(20) and (home / "same").read_bytes() == b"master"
    return master, trainer, sync


def test_the_file_of_an_earlier_node_must_win_whenever_it_comes(home, taken_over):
    master, trainer, sync = taken_over
    trainer.files, trainer.times = {"same": b"later"}, {"same": 3}
    assert sync.catch_up(20) and (home / "same").read_bytes() == b"master"
    trainer.files = {}
    assert sync.catch_up(20) and (home / "same").read_bytes() == b"master"


def test_the_file_of_a_later_node_must_come_home_again_when_there_is_no_other(home, taken_over):
    master, trainer, sync = taken_over
    master.files = {}
    assert sync.catch_up(20) and sync.catch_up(20)  # one look finds it gone, a later one has it
    assert (home / "same").read_bytes() == b"trainer"
    trainer.files = {}
    assert sync.catch_up(20) and not (home / "same").exists()


def test_what_was_given_to_all_nodes_must_go_only_where_the_first_one_has_removed_it(home, synced):
    for name in ("kept", "removed"):
        (home / name).touch()
    master, trainer = Told(), Told()
    master.gone, trainer.gone = ["removed"], ["kept"]
    assert synced(master=master, trainer=trainer).catch_up(20)
    assert [path.name for path in home.iterdir()] == ["kept"]


def test_a_folder_must_go_with_its_last_file_but_never_that_of_the_job(home, synced):
    node = Told()
    node.files = dict.fromkeys(("a/b/one", "a/two", "three"), b"")
    sync = synced(master=node)
    assert sync.catch_up(20)
    node.files = {"a/two": b""}
    assert sync.catch_up(20)
    assert {str(path.relative_to(home)) for path in home.rglob("*")} == {"a", "a/two"}
    node.files = {}
    assert sync.catch_up(20)
    assert home.is_dir() and not list(home.iterdir())


def leads(link: Path) -> str:
    """Where a link leads, which each look makes anew."""

    def read() -> str:
        with contextlib.suppress(FileNotFoundError):
            return os.readlink(link)
        return ""

    return eventually(read)


def test_links_must_follow_those_of_their_node_and_take_the_place_of_nothing_else(home, synced):
    (home / "mine").write_text("ours")
    (home / "earlier").symlink_to("mine")  # of an earlier supervisor
    node = Told()
    node.files = {"one": b"1", "turns": b"file"}
    node.links = {"sub/last": "one", "mine": "one", "old": "one", "earlier": "one"}
    sync = synced(master=node)
    assert sync.catch_up(20)
    assert leads(home / "sub/last") == "one" and leads(home / "old") == "one"
    assert leads(home / "earlier") == "one"
    assert (home / "mine").read_text() == "ours" and not (home / "mine").is_symlink()
    node.links = {"sub/last": "two", "turns": "one"}
    del node.files["turns"]
    assert sync.catch_up(20)
    assert leads(home / "sub/last") == "two" and not (home / "old").is_symlink()
    assert leads(home / "turns") == "one"


def test_a_file_that_comes_back_as_it_was_must_be_brought_home_again(home, synced):
    node, files = Told(), {"state.pt": b"1"}
    node.files = files
    sync = synced(master=node)
    assert sync.catch_up(20)
    node.files = {}  # under a hidden name, say
    assert sync.catch_up(20) and not list(home.iterdir())
    node.files = files
    assert sync.catch_up(20) and (home / "state.pt").exists()


def test_a_log_must_be_here_to_its_last_piece_before_that_is_said(home, synced):
    node = Told()
    (home / "logs").mkdir()
    node.logs = {"logs/rank-0.log": b"0123456789" * 50}  # of which each look brings ten
    assert synced(master=node).catch_up(20)
    assert (home / "logs" / "rank-0.log").read_bytes() == b"0123456789" * 50


def test_what_the_orchestrator_keeps_where_nodes_write_must_be_known_by_name():
    paths = JobPaths(Path("job"))
    ours = {paths.spec, paths.plan, paths.events, paths.report, paths.fence, paths.lock}
    ours |= {paths.supervisor_log}
    assert {str(path.relative_to(paths.shared)) for path in ours if path.is_relative_to(paths.shared)} == OWN


def test_logs_must_have_their_turn_while_a_large_file_comes(home, monkeypatch):
    clock, node, asked = Clock(), Told(), []
    monkeypatch.setattr(sync_module, "time", clock)
    node.files = {"large": b"x" * PIECE * 4}
    converse = node.converse

    def slowly(request: protocol.Request, answer: type) -> protocol.Report:
        asked.append(type(request))
        clock.now += sync_module.MAX_TURN * isinstance(request, protocol.Read)
        return converse(request, answer)

    node.converse = slowly
    sync = FileSync(home, "job", {"master": [0]}, lambda _: node)
    try:
        assert sync.catch_up(20) and (home / "large").stat().st_size == PIECE * 4  # all of it, though it takes long
        assert asked[:8] == [protocol.GetChanges, protocol.Read] * 4
    finally:
        sync.close()


def test_what_a_node_has_replaced_must_stay_until_the_new_is_here(home, monkeypatch):
    clock, node, there = Clock(), Told(), []
    monkeypatch.setattr(sync_module, "time", clock)
    monkeypatch.setattr(sync_module, "SYNC_INTERVAL", 0.01)
    node.files = {"step-1": b"old"}
    converse = node.converse

    def slowly(request: protocol.Request, answer: type) -> protocol.Report:
        clock.now += sync_module.MAX_TURN * isinstance(request, protocol.Read)
        there.append((home / "step-1").exists())
        return converse(request, answer)

    node.converse = slowly
    sync = FileSync(home, "job", {"master": [0]}, lambda _: node)
    try:
        assert sync.catch_up(20)
        node.files, count = {"step-2": b"x" * PIECE * 3}, len(there)
        assert sync.catch_up(20)
        assert all(there[count : count + 6]) and [path.name for path in home.iterdir()] == ["step-2"]
    finally:
        sync.close()
