"""Copies of folders that a hostile job writes, and fetches from a store that others can write to."""

import io
import os
import socket
from pathlib import Path

import pytest
from support.object_stores import Trigger, fetched, undeletable
from support.waiting import eventually

from orchestrate.errors import StorageError
from orchestrate.files.folder import MAX_DEPTH, Folder
from orchestrate.node.trees import FOLDER, clear
from orchestrate.storage import manifest as manifests
from orchestrate.storage import scan as scans
from orchestrate.storage.content import Changed, Unreadable
from orchestrate.storage.fetch import never, restore
from orchestrate.storage.manifest import Damaged, contents, key_of, newest
from orchestrate.storage.store import open_store


@pytest.fixture
def store(tmp_path):
    return open_store(f"file://{tmp_path}/store")


@pytest.fixture
def secret(tmp_path) -> Path:
    path = tmp_path / "secret"
    path.mkdir()
    (path / "key").write_text("the host's")
    return path


def everything(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


# --- the local folder


def test_only_regular_files_must_be_copied_and_others_reported(store, saved, elsewhere, secret, tmp_path, monkeypatch):
    saved.write("state.pt", b"good")
    (saved.path / "file").symlink_to(secret / "key")
    (saved.path / "folder").symlink_to(secret)
    os.mkfifo(saved.path / "pipe")
    Path(os.fsdecode(os.fsencode(saved.path) + b"/\xff")).write_bytes(b"odd")
    monkeypatch.chdir(saved.path)  # an address has 107 bytes
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
        mirror = saved.copy(store)
    assert fetched(store, elsewhere) == {"state.pt": b"good"}
    assert sorted(mirror.state.skipped) == [
        "'\\udcff': its name is not UTF-8",
        "'file': not a regular file",
        "'folder': not a regular file",
        "'pipe': not a regular file",
        "'socket': not a regular file",
    ]
    assert b"the host's" not in everything(tmp_path / "store")


def test_a_folder_that_is_a_link_must_not_be_copied(store, saved, secret, tmp_path):
    saved.path.rmdir()
    saved.path.symlink_to(secret)
    saved.copy(store)
    assert everything(tmp_path / "store") == b""


def test_files_up_to_the_nesting_limit_must_be_copied_and_deeper_ones_reported(store, saved, elsewhere):
    last = "a/" * (MAX_DEPTH - 1) + "last"
    saved.write(last, b"1")
    for name, depth in (("b", MAX_DEPTH), ("c", MAX_DEPTH + 5)):
        saved.write(f"{name}/" * depth + "x", b"2")
    mirror = saved.copy(store)
    reports = [(text[1], text.partition(": ")[2]) for text in sorted(mirror.state.skipped)]
    assert reports == [("b", "more than 32 nested folders"), ("c", "more than 32 nested folders")]
    assert fetched(store, elsewhere) == {last: b"1"}


def test_paths_that_are_too_long_must_be_reported(store, saved):
    here = os.open(saved.path, os.O_RDONLY)
    for _ in range(21):
        os.mkdir("x" * 200, dir_fd=here)
        inner = os.open("x" * 200, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=here))
    os.close(here)
    try:
        mirror = saved.copy(store)
    finally:
        clear(str(saved.path))  # pytest cannot remove such paths
    assert [why.partition(": ")[2] for why in mirror.state.skipped] == ["its path is longer than 4,000 bytes"]
    assert newest(store) is None


def test_a_manifest_that_could_not_be_read_must_not_be_written(store, saved, monkeypatch):
    monkeypatch.setattr(manifests, "MAX_MANIFEST", 1000)
    saved.write("a", b"1")
    saved.copy(store)
    for number in range(10):
        saved.write("long" * 50 + str(number), b"1")
    with pytest.raises(StorageError, match="checkpoints has too many files with long paths to copy"):
        saved.copy(store)
    assert manifests.sequences(store) == {1}


def test_files_that_no_manifest_can_name_must_end_a_copy_before_the_first_is_uploaded(store, saved, monkeypatch):
    monkeypatch.setattr(manifests, "MAX_MANIFEST", 1000)
    for number in range(5):
        saved.write(str(number), b"1")
    mirror = saved.mirror(store)
    mirror.start()
    mirror.finish()
    eventually(lambda: mirror.finished)
    assert mirror.close(0).error == "checkpoints has too many files with long paths to copy"
    assert not [*store.list("")]


@pytest.mark.parametrize("at", [1, 2], ids=["before the first read", "before the upload"])
@pytest.mark.parametrize("kind", ["link", "pipe", "nothing", "folder"])
def test_a_file_that_is_replaced_after_the_scan_must_not_be_copied(store, saved, secret, tmp_path, kind, at):
    path = saved.write("state.pt", os.urandom(6 << 20))
    replace = {
        "link": lambda: path.symlink_to(secret / "key"),
        "pipe": lambda: os.mkfifo(path),
        "nothing": lambda: None,
        "folder": path.mkdir,
    }[kind]
    mirror = saved.mirror(store)
    with pytest.raises(Changed, match="'checkpoints/state.pt' "):
        mirror.sync(Trigger({1: 1, 2: 7}[at], lambda: (path.unlink(), replace())), final=True)
    assert everything(tmp_path / "store") == b""
    assert mirror.sync(never, final=True)


def test_a_folder_that_is_replaced_by_a_link_after_the_scan_must_not_be_followed(store, saved, secret, tmp_path):
    path = saved.write("step/key", b"the job's!")

    def replace() -> None:
        path.parent.rename(saved.path / "moved")
        path.parent.symlink_to(secret)

    with pytest.raises(Changed):
        saved.mirror(store).sync(Trigger(1, replace), final=True)
    assert everything(tmp_path / "store") == b""


class Broken(io.FileIO):
    def read(self, size: int | None = -1) -> bytes:
        raise PermissionError(13, "Permission denied")


@pytest.mark.parametrize("at", ["open", "read"])
@pytest.mark.parametrize("whole", [True, False])
def test_a_file_that_cannot_be_read_must_not_be_part_of_a_whole_copy(store, saved, elsewhere, monkeypatch, whole, at):
    saved.write("state.pt", b"1")
    locked = saved.write("locked.pt", b"2")
    opened = Folder.open

    def refuse(folder, path: str):
        if path.endswith("locked.pt") and at == "read":
            return Broken(locked)
        if path.endswith("locked.pt"):
            raise PermissionError(13, "Permission denied")  # root can read every file
        return opened(folder, path)

    monkeypatch.setattr("orchestrate.files.folder.Folder.open", refuse)
    mirror = saved.mirror(store, whole=whole)
    if whole:
        with pytest.raises(Unreadable, match="'checkpoints/locked.pt' cannot be read: Permission denied"):
            mirror.sync(never, final=True)
    else:
        assert not mirror.sync(never, final=True)
        assert mirror.state.skipped == ("'checkpoints/locked.pt' cannot be read: Permission denied",)
    monkeypatch.undo()
    assert fetched(store, elsewhere) == ({} if whole else {"state.pt": b"1"})


def test_a_folder_that_cannot_be_read_must_not_look_empty(saved):
    class Closed(Folder):
        def opened(self, below="", make=False, mode=FOLDER):
            if below == "checkpoints/locked/":
                raise PermissionError(13, "Permission denied")  # root can read every folder
            return super().opened(below, make, mode)

    saved.write("locked/a", b"1")
    with pytest.raises(PermissionError, match="Permission denied: 'checkpoints/locked/'"):
        scans.scan(Closed(saved.folder.parent, saved.folder.name), "checkpoints")


def test_too_many_files_must_be_refused_rather_than_copied_in_part(store, saved, monkeypatch):
    monkeypatch.setattr(scans, "MAX_FILES", 10)
    for number in range(11):
        saved.write(f"{number % 3}/{number}", b"")
    with pytest.raises(StorageError, match="checkpoints has more than 10 files, which are too many to copy"):
        saved.copy(store)
    assert newest(store) is None


@pytest.mark.parametrize("make", [Path.touch, Path.mkdir], ids=["files", "folders"])
def test_names_that_would_take_too_much_memory_must_be_refused(store, saved, monkeypatch, make):
    """With a single emoji, each character takes four bytes."""
    monkeypatch.setattr(scans, "MAX_NAMES", 8_000)
    for number in range(10):
        make(saved.path / f"{number}{'a' * 200}")
    saved.copy(store)
    for number in range(10):
        make(saved.path / f"{number}{'a' * 190}\N{PARTY POPPER}")
    with pytest.raises(StorageError, match="checkpoints has file names of more than"):
        saved.copy(store)


def test_files_that_would_take_a_store_too_much_must_be_reported(store, saved):
    for name, size in (("huge", (256 << 30) + 1), ("sparse", (1 << 30) + 1), ("small", 1)):
        os.truncate(saved.write(name, b""), size)
    mirror, sparse = saved.copy(store), "a sparse file, which has much less content than its size"
    assert sorted(mirror.state.skipped) == ["'huge': larger than 256 GiB", f"'sparse': {sparse}"]
    assert mirror.state.files == 1
    for number in range(9):
        os.truncate(saved.write(f"hollow-{number}", b""), 200 << 20)
    mirror = saved.copy(store)
    assert len(mirror.state.skipped) == 6 and mirror.state.files == 5  # these of them have 1,000 MiB


@pytest.mark.parametrize("name", ["x" * 255, "ü" * 127, "a=sha256-" + "0" * 64, "#1", "\\", "..a", "%2e%2e", " "])
def test_every_name_must_be_copied(store, saved, elsewhere, name):
    name = name.replace("..a", "a..")
    saved.write(f"{name}/{name}", b"1")
    saved.copy(store)
    assert fetched(store, elsewhere) == {f"{name}/{name}": b"1"}


def test_the_key_of_a_file_must_be_the_same_in_every_version():
    assert key_of("a b/ü#", "0" * 64) == f"files/a=20b/=C3=BC=23=sha256-{'0' * 64}"


def test_long_paths_must_be_copied(store, saved, elsewhere):
    saved.write(f"{'ü' * 127}/" * 12 + "last", b"1")
    saved.copy(store)
    assert max(len(key) for key, _ in store.list("files")) < 700
    assert fetched(store, elsewhere) == saved.files()


# --- the store


def test_an_object_that_is_longer_than_listed_must_not_fill_the_disk(store, saved, elsewhere):
    saved.write("a", b"data")
    saved.copy(store)
    written, read = 0, store.read

    def endless(key: str):
        nonlocal written
        while True:
            written += 1
            yield b"data"

    store.read = lambda key: endless(key) if key.startswith("files") else read(key)
    with pytest.raises(Damaged):
        restore(store, elsewhere.folder, "checkpoints")
    assert written == 2


def test_files_must_not_be_fetched_through_a_link(store, saved, elsewhere, secret):
    saved.write("key", b"the store's")
    saved.copy(store)
    elsewhere.path.rmdir()
    elsewhere.path.symlink_to(secret)
    with pytest.raises(StorageError, match="cannot fetch"):
        restore(store, elsewhere.folder, "checkpoints")
    elsewhere.path.unlink()
    hidden = elsewhere.path.parent / ".checkpoints.fetching"
    hidden.symlink_to(secret)
    restore(store, elsewhere.folder, "checkpoints")
    assert fetched(store, elsewhere) == {"key": b"the store's"} and not hidden.is_symlink()
    assert (secret / "key").read_text() == "the host's" and [*secret.iterdir()] == [secret / "key"]


def test_an_object_that_cannot_be_deleted_must_not_keep_the_others(tmp_path, saved):
    """As one under a retention policy."""
    store = open_store(f"file://{tmp_path}/store")
    mirror = saved.mirror(store)
    with undeletable(store, "files/locked"):
        for content in range(6):
            for name in ("locked", "b", "c", "d"):
                saved.write(name, b"%d" % content)
            assert mirror.sync(never, final=True)
    kept = [key.partition("=")[0].removeprefix("files/") for key in contents(store).objects]
    assert {name: kept.count(name) for name in ("b", "c", "d")} == {"b": 2, "c": 2, "d": 2}


@pytest.mark.parametrize("seconds", [12 * 10**9, -(10**10)], ids=["2350", "1653"])
def test_a_file_with_a_date_that_a_manifest_cannot_have_must_be_copied(store, saved, elsewhere, seconds):
    """As ext4 can have until 2446, and archives can set."""
    os.utime(saved.write("odd", b"x"), (seconds, seconds))
    for step in range(3):
        saved.write(f"step-{step}.pt", b"%d" % step)
        saved.copy(store)
    assert fetched(store, elsewhere) == {"odd": b"x"} | {f"step-{step}.pt": b"%d" % step for step in range(3)}


def test_a_manifest_that_leaves_no_number_for_the_next_must_be_ignored(tmp_path, saved):
    store = open_store(f"file://{tmp_path}/store")
    saved.write("a", b"1")
    saved.copy(store)
    (tmp_path / "store/manifests/999999999999.json").write_text("{}")
    saved.write("a", b"2")
    saved.copy(store)
    numbers = {f"{number:012}.json" for number in (1, 2, 10**12 - 1)}
    assert {*os.listdir(tmp_path / "store/manifests")} == numbers
