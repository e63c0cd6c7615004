"""Manifests in a store that others can write to."""

import hashlib
import json
import tracemalloc

import pytest
from support.memory import peak
from support.object_stores import fetched

from orchestrate.errors import StorageError
from orchestrate.storage import manifest as manifests
from orchestrate.storage.fetch import never, restore
from orchestrate.storage.manifest import Damaged, contents, intact, key_of, manifest_key, newest
from orchestrate.storage.store import open_store


@pytest.fixture
def store(tmp_path):
    return open_store(f"file://{tmp_path}/store")


def entry(path: str, data: bytes = b"data", **changes) -> dict:
    sha256 = hashlib.sha256(data).hexdigest()
    return {"path": path, "key": key_of(path, sha256), "size": len(data), "mtime_ns": 1, "sha256": sha256} | changes


def place(store, *files: dict, number: int = 1, **changes) -> None:
    """Write a manifest with a correct checksum, as someone with access to the bucket can."""
    fields = {"version": 1, "sequence": number, "job": "j", "writer": "w", "time": 1.0, "files": [*files]} | changes
    checksum = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
    store.put(manifest_key(number), json.dumps({"manifest": fields, "sha256": checksum}).encode())


PATHS = ["../x", "/etc/x", "a/../x", "a/./x", "a//x", "a/", "", ".", "..", ".hidden", "a/.b/x", "nul\0", "\udcff"]
PATHS += ["x" * 256, "a/" * 32 + "x", "é" * 128, ("x" * 200 + "/") * 31 + "x"]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: ascii(path[:20]))
def test_a_manifest_must_not_name_a_path_elsewhere(store, elsewhere, path):
    place(store, entry(path))
    with pytest.raises(Damaged, match="path must |path has text that cannot be encoded"):
        manifests.read(store, 1)
    with pytest.raises(Damaged, match="no intact copy"):
        restore(store, elsewhere.folder, "checkpoints")
    assert [*elsewhere.path.parent.iterdir()] == [elsewhere.path] and not elsewhere.files()


EXCLUDE = "its number is wrong, or paths exclude each other"
MANIFESTS = {  # the files, and why they are refused
    "a wrong key": (lambda: [entry("a", key="files/b=sha256-" + "0" * 64)], "a key does not match its file"),
    "a key elsewhere": (lambda: [entry("a", key="../a")], "a key does not match its file"),
    "a path twice": (lambda: [entry("a"), entry("a")], EXCLUDE),
    "a file that is a folder": (lambda: [entry("a/b"), entry("a")], EXCLUDE),
    "a negative size": (lambda: [entry("a", size=-1)], "size must be a whole number from 0 to"),
    "a huge size": (lambda: [entry("a", size=1 << 60)], "size must be a whole number from 0 to"),
    "a size that is text": (lambda: [entry("a", size="4")], "size must be a whole number from 0 to"),
    "a time out of range": (lambda: [entry("a", mtime_ns=1 << 70)], "mtime_ns must be a time in nanoseconds"),
    "a time that is no number": (lambda: [entry("a", mtime_ns=True)], "mtime_ns must be a time in nanoseconds"),
    "no digest": (lambda: [entry("a", sha256="../..")], "sha256 must be 64 hexadecimal digits"),
    "a missing field": (lambda: [{"path": "a"}], "key is missing"),
    "numbers for entries": (lambda: [7], "files must not be 7"),
    "a larger size than the object": (lambda: [entry("a", size=5)], "is missing, or has another size"),
    "an object that does not exist": (lambda: [entry("missing", b"other")], "is missing, or has another size"),
}


@pytest.mark.parametrize(("files", "why"), MANIFESTS.values(), ids=MANIFESTS)
def test_a_manifest_that_is_not_consistent_must_be_skipped(store, saved, elsewhere, files, why):
    saved.write("a", b"data")
    saved.copy(store)
    place(store, *files(), number=2)
    problems: list[Damaged] = []
    assert next(intact(store, contents(store), problems)).sequence == 1
    assert [why in str(problem) for problem in problems] == [True]
    assert fetched(store, elsewhere) == {"a": b"data"}


FIELDS = {
    "another version of orchestrate wrote it": {"version": 2},
    EXCLUDE: {"sequence": 7},
    "time must be a number of seconds": {"time": "now"},
    "it has an unknown format": {"files": 1},
    "job must be a short text": {"job": "x" * 300},
}


@pytest.mark.parametrize(("why", "changes"), FIELDS.items(), ids=FIELDS)
def test_a_manifest_with_other_fields_must_be_skipped(store, saved, elsewhere, why, changes):
    saved.write("a", b"data")
    saved.copy(store)
    place(store, number=2, **changes)
    with pytest.raises(Damaged, match=why):
        manifests.read(store, 2)
    assert fetched(store, elsewhere) == {"a": b"data"}


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b'{"manifest": 1}', b"\xff", '"ü"'.encode(), b"[" * 100_000, b"null"]
)
def test_a_manifest_that_is_damaged_must_be_skipped(store, saved, elsewhere, text):
    saved.write("a", b"data")
    saved.copy(store)
    store.put(manifest_key(2), text)
    assert fetched(store, elsewhere) == {"a": b"data"}


def test_a_manifest_with_a_flipped_bit_must_be_skipped(store, saved, elsewhere):
    mirror = saved.mirror(store)
    for data in (b"older", b"newer"):
        saved.write("a", data)
        mirror.sync(never, final=True)
    text = b"".join(store.read(manifest_key(2)))
    store.put(manifest_key(2), text.replace(b'"first-1"', b'"first-2"'))
    assert fetched(store, elsewhere) == {"a": b"older"}


def test_a_manifest_with_too_many_files_must_be_refused(store, monkeypatch):
    monkeypatch.setattr(manifests, "MAX_FILES", 2)
    place(store, entry("a"), entry("b"), entry("c"))
    with pytest.raises(Damaged, match="it names more than 2 files"):
        newest(store)


@pytest.mark.parametrize(
    ("paths", "whole"),
    [(["a/b/c/1", "a/b/c/2", "a/b/d/3"], True), (["a/b/1", "ab/c/2", "a/b2/3"], False), (["a/b/c/d/e/f/g"], True)],
)
def test_a_manifest_with_too_many_folders_must_be_refused(store, monkeypatch, paths, whole):
    monkeypatch.setattr(manifests, "MAX_FILES", 7)
    place(store, *map(entry, paths))
    if whole:
        assert len(manifests.read(store, 1).files) == len(paths)
        return
    with pytest.raises(Damaged, match="it names more than 7 files and folders"):
        manifests.read(store, 1)


@pytest.mark.parametrize("value", ["[]", "{}", "0", '""'])
def test_a_manifest_of_small_values_must_be_refused_before_it_is_parsed(store, monkeypatch, value):
    monkeypatch.setattr(manifests, "MAX_VALUES", 1000)
    store.put(manifest_key(1), f"[{','.join([value] * 1001)}".encode())  # no JSON
    with pytest.raises(Damaged, match="it has too many values"):
        newest(store)


def test_a_long_text_must_take_little_memory_before_it_is_refused(store):
    store.put(manifest_key(1), b'["' + b"\\," * 1_000_000)
    tracemalloc.start()
    with pytest.raises(Damaged):
        newest(store)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 32 << 20


def test_long_paths_must_take_little_memory(store):
    """All folders of all paths would take a hundred times as much."""
    folders = "\N{PARTY POPPER}/" + "/".join(f"{'f' * 100}" for _ in range(30))
    files = [entry(f"{folders}/{number}") for number in range(100)]
    place(store, *files)
    size = sum(len(one["path"]) for one in files)
    found, most = peak(lambda: manifests.read(store, 1))
    assert len(found.files) == 100 and most < 30 * size


def test_a_manifest_with_escaped_text_must_be_a_quarter_as_large(store, saved, elsewhere, monkeypatch):
    monkeypatch.setattr(manifests, "MAX_MANIFEST", 3000)
    saved.write("a" * 200 + "/" + "b" * 200, b"1")
    saved.copy(store)
    saved.write("\N{PARTY POPPER}", b"1")
    with pytest.raises(StorageError, match="has too many files with long paths to copy"):
        saved.copy(store)
    assert len(fetched(store, elsewhere)) == 1
    place(store, entry("a"), entry("\N{PARTY POPPER}" * 40), number=2)
    with pytest.raises(Damaged, match="it is too large"):
        manifests.read(store, 2)


def test_only_digits_and_names_of_ascii_must_count(store):
    store.put("manifests/00000000000\N{ARABIC-INDIC DIGIT NINE}.json", b"")
    store.put(f"files/\N{PARTY POPPER}=sha256-{'0' * 64}", b"")
    assert contents(store) == manifests.Contents(set(), {})


def test_keys_that_are_too_long_must_not_be_kept_in_memory(store):
    key = key_of("x" * 200 + "/" + "y" * 200, "0" * 64)
    store.put(key, b"")
    store.put(f"files/{('x' * 200 + '/') * 5}a=sha256-{'0' * 64}", b"")
    assert [*contents(store).objects] == [key]


def test_commas_and_brackets_in_names_must_not_count_as_values(store, saved, monkeypatch):
    monkeypatch.setattr(manifests, "MAX_VALUES", 100)
    saved.write('\\"' + ",[{" * 60, b"data")
    saved.copy(store)
    assert newest(store)


def test_a_manifest_of_endless_length_must_be_refused(store, monkeypatch):
    monkeypatch.setattr(manifests, "MAX_MANIFEST", 1 << 20)
    store.put(manifest_key(1), b"")
    pieces = iter([b" " * (2 << 20)])
    store.read = lambda key: iter(lambda: next(pieces, None) or pytest.fail("read on"), b"")
    with pytest.raises(Damaged, match="is larger than 1 MiB"):
        newest(store)


@pytest.mark.parametrize("damage", ["missing", "shorter", "longer", "changed"])
def test_the_files_of_the_manifest_before_must_be_used_if_one_of_the_newest_is_damaged(
    store, saved, elsewhere, tmp_path, damage
):
    mirror = saved.mirror(store)
    for data in (b"older", b"newer"):
        saved.write("a", data)
        saved.write(f"only in {data!r}", data)
        mirror.sync(never, final=True)
        if data == b"older":
            saved.clear()
    (path,) = (tmp_path / "store" / "files").glob("a=sha256-" + hashlib.sha256(b"newer").hexdigest())
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes({"shorter": b"newe", "longer": b"newer!", "changed": b"never"}[damage])
    warnings: list[str] = []
    found = restore(store, elsewhere.folder, "checkpoints", warn=warnings.append)
    assert found and found.sequence == 1
    assert elsewhere.files() == {"a": b"older", "only in b'older'": b"older"}
    assert len(warnings) == 1 and warnings[0].endswith("; using an older copy")
    assert not [*elsewhere.path.parent.glob(".*")]


@pytest.mark.parametrize("damage", ["manifest", "content"])
def test_a_job_must_not_start_anew_if_everything_is_damaged(store, saved, elsewhere, tmp_path, damage):
    saved.write("a", b"data")
    saved.copy(store)
    folder = "manifests" if damage == "manifest" else "files"
    (path,) = (tmp_path / "store" / folder).iterdir()
    path.write_bytes(b"tada")
    with pytest.raises(Damaged, match="has no intact copy: ") as caught:
        restore(store, elsewhere.folder, "checkpoints")
    assert caught.value.hint == "restore it from a backup, or use another prefix to start without it"
    if damage == "manifest":
        with pytest.raises(Damaged):
            elsewhere.copy(store)
        assert path.exists()
