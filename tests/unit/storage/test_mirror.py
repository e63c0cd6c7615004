"""Copies of checkpoints in an object store: complete, consistent, and continued after any interruption."""

import hashlib
import itertools
import mmap
import os
import tempfile
import time
import tracemalloc
from pathlib import Path

import pytest
from support.object_stores import BIG, MIB, Saved, Trigger, fetched, run_mirror, undeletable
from support.optional import not_none
from support.repo import ROOT
from support.waiting import eventually

from orchestrate.errors import StorageConflict, StorageError
from orchestrate.storage.content import Changed, Content
from orchestrate.storage.fetch import never
from orchestrate.storage.manifest import Damaged, contents, key_of, manifest_key, newest
from orchestrate.storage.scan import Facts
from orchestrate.storage.store import open_store

COARSE = getattr(time, "CLOCK_REALTIME_COARSE", time.CLOCK_REALTIME)  # that of files' times

# --- what is copied


def test_files_must_arrive_on_another_machine_with_their_times_and_need_not_be_copied_again(
    request, store, saved, elsewhere
):
    # S3 lists at most 1000 objects in one answer.
    count = 1000 if request.node.callspec.params["store"] == "rclone" else 20
    for number in range(count):
        saved.write(f"step-{number % 7}/rank-{number}.pt", b"%d" % number)
    saved.write("step-0/.metadata", b"of torch's distributed checkpoints")
    saved.write("empty", b"")
    saved.write("big", os.urandom(12 * MIB))  # three parts
    saved.write("a b/ü#?%&+'\n.pt", b"odd")
    os.utime(saved.path / "empty", ns=(1, 1_234_567_890_123_456_789))
    mirror = saved.copy(store)
    assert mirror.state.files == count + 4
    assert fetched(store, elsewhere) == saved.files()
    assert (elsewhere.path / "empty").stat().st_mtime_ns == 1_234_567_890_123_456_789
    mirror = elsewhere.copy(store)
    assert (mirror.state.files, mirror.state.complete) == (0, True)
    assert not_none(newest(store)).sequence == 1


def test_a_large_file_must_be_copied_with_bounded_memory(rclone, saved):
    saved.write("big", os.urandom(BIG))
    done = run_mirror(open_store("s3://bucket/x"), saved)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < BIG / 1.5


def test_a_large_file_must_be_fetched_with_bounded_memory(rclone, saved, elsewhere):
    saved.write("big", os.urandom(BIG))
    store = open_store("s3://bucket/x")
    saved.copy(store)
    done = run_mirror(store, elsewhere, "fetch")
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < BIG / 1.5
    assert elsewhere.files() == saved.files()


def test_a_file_must_be_copied_only_once_it_has_settled(tmp_path, saved, elsewhere):
    store = open_store(f"file://{tmp_path}/store")
    path = saved.write("state.pt", b"half")
    mirror = saved.mirror(store)
    assert not mirror.sync(never)
    path.write_bytes(b"complete")
    assert not mirror.sync(never)
    assert newest(store) is None and (mirror.state.pending_files, mirror.state.pending_bytes) == (1, 8)
    assert mirror.sync(never) and not mirror.state.complete  # more may be written
    assert fetched(store, elsewhere) == {"state.pt": b"complete"}


@pytest.fixture
def on_disk():
    """A job folder on a disk: the temporary one may be in memory, where a file system does not see such writes."""
    with tempfile.TemporaryDirectory(dir=ROOT) as folder:
        yield Saved(Path(folder) / "here")


@pytest.mark.parametrize("how", ["through memory", "with the same times"])
def test_a_file_that_is_changed_again_must_be_copied_again(tmp_path, on_disk, elsewhere, how):
    store = open_store(f"file://{tmp_path}/store")
    path = on_disk.write("state.pt", b"A" * 4096)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        memory[:2] = b"BB"
        mirror = on_disk.mirror(store)
        assert not mirror.sync(never) and mirror.sync(never)
        times = path.stat().st_atime_ns, path.stat().st_mtime_ns
        # Two changes in one tick of the kernel's clock have the same time; the mirror waits longer before it copies.
        eventually(lambda: time.clock_gettime_ns(COARSE) > path.stat().st_ctime_ns)
        if how == "through memory":
            memory[:2] = b"CC"
        else:
            path.write_bytes(b"CC" + b"A" * 4094)
            os.utime(path, ns=times)
    assert mirror.sync(never, final=True)
    assert fetched(store, elsewhere) == {"state.pt": b"CC" + b"A" * 4094}


def test_a_manifest_must_hold_either_all_files_or_wait(tmp_path, saved, elsewhere):
    store = open_store(f"file://{tmp_path}/store")
    saved.write("rank-0.pt", b"0")
    mirror = saved.mirror(store)
    mirror.sync(never)
    saved.write("rank-1.pt", b"1")
    assert not mirror.sync(never) and newest(store) is None
    assert mirror.sync(never)
    assert fetched(store, elsewhere) == {"rank-0.pt": b"0", "rank-1.pt": b"1"}


def test_output_must_be_copied_while_another_file_is_being_written(tmp_path, saved, elsewhere):
    store = open_store(f"file://{tmp_path}/store")
    saved.write("plot.png", b"plot")
    log = saved.write("log", b"1\n")
    mirror = saved.mirror(store, whole=False)
    mirror.sync(never)
    assert mirror.sync(never)
    log.write_bytes(b"1\n2\n")
    saved.write("new.png", b"new")
    mirror.sync(never)
    log.write_bytes(b"1\n2\n3\n")
    assert not mirror.sync(never)
    assert fetched(store, elsewhere) == {"plot.png": b"plot", "new.png": b"new", "log": b"1\n"}
    assert mirror.sync(never, final=True)
    assert fetched(store, elsewhere) == saved.files()


def test_temporary_files_must_not_be_copied(tmp_path, saved):
    store = open_store(f"file://{tmp_path}/store")
    saved.write(".state.pt.tmp", b"x")
    saved.write(".step-1/state.pt", b"x")
    saved.copy(store)
    assert newest(store) is None


def test_only_the_newest_two_sets_must_be_kept(store, saved, elsewhere):
    mirror = saved.mirror(store)
    for step in range(5):
        saved.clear()
        saved.write(f"step-{step}.pt", b"%d" % step)
        assert mirror.sync(never, final=True)
    there = contents(store)
    assert there.sequences == {4, 5}
    assert [key.partition("=")[0] for key in sorted(there.objects)] == ["files/step-3.pt", "files/step-4.pt"]


def test_a_file_that_is_uploaded_again_before_its_deletion_is_retried_must_be_kept(tmp_path, saved, elsewhere):
    store = open_store(f"file://{tmp_path}/store")
    mirror = saved.mirror(store)
    with undeletable(store, "files/"):
        for content in (b"1", b"2", b"3"):
            saved.write("state.pt", content)
            saved.write("step.pt", content * 2)
            assert mirror.sync(never, final=True)
    saved.write("state.pt", b"1")
    assert mirror.sync(never, final=True)
    assert fetched(store, elsewhere) == {"state.pt": b"1", "step.pt": b"33"}
    assert len(contents(store).objects) == 3


def test_a_file_that_is_too_large_for_the_usual_parts_must_be_copied_in_larger_ones(moto, monkeypatch):
    monkeypatch.setattr("orchestrate.storage.remote.MAX_PARTS", 2)
    store = open_store(moto)
    store.put_stream("big", 16 * MIB, iter([bytes(MIB)] * 16))
    (version,) = store.versions()
    assert version.size == 16 * MIB and '-2"' in version.tag  # as S3 marks objects of two parts


def test_an_object_that_is_replaced_must_have_another_tag(tmp_path):
    store = open_store(f"file://{tmp_path}/store")
    store.put("a", b"1")
    (before,) = store.versions()
    store.put("a", b"2")
    (after,) = store.versions()
    assert before.size == after.size and before.tag != after.tag


def test_other_objects_below_the_prefix_must_be_left_alone(store, saved):
    store.put("files/photo.jpg", b"the user's")
    store.put("manifests/readme.txt", b"the user's")
    mirror = saved.mirror(store)
    for step in range(4):
        saved.write("state.pt", b"%d" % step)
        assert mirror.sync(never, final=True)
    assert {key for key, _ in store.list("files")} >= {"files/photo.jpg"}
    assert {key for key, _ in store.list("manifests")} >= {"manifests/readme.txt"}


def test_an_empty_folder_must_not_replace_what_was_copied(tmp_path, saved, elsewhere):
    store = open_store(f"file://{tmp_path}/store")
    saved.write("state.pt", b"precious")
    committed = not_none(saved.copy(store).state.committed)
    saved.clear()
    for _ in range(3):
        assert saved.copy(store).state.committed == committed
    assert fetched(store, elsewhere) == {"state.pt": b"precious"}


def test_equal_content_must_be_copied_once(tmp_path, saved, elsewhere):
    store = open_store(f"file://{tmp_path}/store")
    mirror = saved.mirror(store)
    saved.write("last.pt", b"the same")
    mirror.sync(never, final=True)
    os.rename(saved.path / "last.pt", saved.path / "older")
    os.rename(saved.path / "older", saved.path / "last.pt")
    mirror.sync(never, final=True)
    assert mirror.state.files == 1


def test_an_object_that_was_cut_short_must_be_uploaded_again(tmp_path, saved, elsewhere):
    store = open_store(f"file://{tmp_path}/store")
    saved.write("state.pt", b"whole")
    store.put(key_of("state.pt", hashlib.sha256(b"whole").hexdigest()), b"who")
    saved.copy(store)
    assert fetched(store, elsewhere) == saved.files()


def test_files_that_a_manifest_names_must_not_be_read_again_by_another_process(tmp_path, saved):
    store = open_store(f"file://{tmp_path}/store")
    saved.write("big", os.urandom(8 * MIB))
    for reads in (1 + 8 + 8, 1):  # asked before the file, and for each MiB to hash and to upload
        asked = itertools.count()
        assert saved.mirror(store).sync(lambda asked=asked: next(asked) < 0, final=True)
        assert next(asked) == reads


# --- consistency


CHANGES = {  # size in bytes, and the number of the read before which the file changes
    "small, first read": (1000, 2),
    "small, during the upload": (1000, 3),
    "large, first read": (16 * MIB, 10),
    "large, during the upload": (16 * MIB, 26),
}


@pytest.mark.parametrize(("size", "at"), CHANGES.values(), ids=CHANGES)
def test_a_file_that_changes_while_it_is_copied_must_be_copied_again(store, saved, elsewhere, size, at):
    saved.write("state.pt", b"old " * 5)
    mirror = saved.copy(store)
    path = saved.write("state.pt", os.urandom(size))

    def change() -> None:
        with path.open("r+b") as file:
            file.seek(size - 1)
            file.write(b"!")

    with pytest.raises(Changed):
        mirror.sync(Trigger(at, change), final=True)
    assert fetched(store, elsewhere) == {"state.pt": b"old " * 5}
    assert {size for _, size in store.list("files")} == {20}
    assert mirror.sync(never, final=True)
    assert fetched(store, elsewhere) == saved.files()


def test_what_failed_rounds_have_uploaded_must_not_pile_up(tmp_path, saved, elsewhere):
    """A job can change a file during each round, so that none of them comes to its end."""
    store = open_store(f"file://{tmp_path}/store")
    for text in (b"first", b"second"):
        saved.write("a", text)
        saved.copy(store)
    mirror = saved.mirror(store)
    for number in range(12):
        saved.write("a", os.urandom(20)), saved.write(f"name-{number}", b"x" * (number + 1))
        saved.write("bad", b"y" * (number + 1))
        with pytest.raises(Changed):
            mirror.sync(lambda: saved.write("bad", os.urandom(9)) is None, final=True)
        (saved.path / f"name-{number}").unlink()
    assert len([*store.list("files")]) < 6
    assert contents(store).sequences == {1, 2}  # the one before the newest is still there, in case that is damaged
    assert mirror.sync(never, final=True)
    assert fetched(store, elsewhere) == saved.files()


def test_each_check_of_a_file_must_notice_a_change(saved):
    """Together they would hide that one of them is missing."""
    path = saved.write("state.pt", b"x" * 2 * MIB)

    def content(stopped=never) -> Content:
        return Content(saved.folder, "checkpoints/state.pt", Facts.of(path.stat()), stopped)

    with pytest.raises(Changed, match="changed while it was copied"):
        content(Trigger(2, lambda: path.write_bytes(b"y" * 2 * MIB))).digest()
    with pytest.raises(Changed, match="changed while it was copied"):
        list(content().pieces("0" * 64))
    before = content()
    path.write_bytes(b"z" * 2 * MIB)
    with pytest.raises(Changed, match="changed before it was copied"):
        before.digest()


def test_files_that_are_removed_after_their_upload_must_be_in_the_manifest_of_their_scan(tmp_path, saved, elsewhere):
    store = open_store(f"file://{tmp_path}/store")
    for name in "abcdefgh":
        saved.write(name, name.encode())
    files = saved.files()
    mirror = saved.mirror(store)
    put, done = store.put, []

    def put_and_remove(key: str, data: bytes) -> None:
        put(key, data)
        done.append(data)
        if len(done) == len(files):
            saved.clear()

    store.put = put_and_remove
    mirror.sync(never, final=True)
    assert fetched(store, elsewhere) == files


def test_two_writers_must_not_write_the_same_manifest(moto, saved, elsewhere):
    """Both have seen the same manifests; the slower one learns from the store's answer that it is late."""
    store, other_store = open_store(moto), open_store(moto)
    saved.write("state.pt", b"first")
    elsewhere.write("state.pt", b"second")
    first, second = saved.mirror(store, job="first-1"), elsewhere.mirror(other_store, job="second-2")
    create = other_store.create

    def create_late(key: str, data: bytes) -> None:
        assert first.sync(never, final=True)
        create(key, data)

    other_store.create = create_late
    with pytest.raises(StorageConflict, match="job 'first-1' also writes there"):
        second.sync(never, final=True)
    assert fetched(store, elsewhere) == {"state.pt": b"first"}
    saved.write("state.pt", b"third")
    assert first.sync(never, final=True)


def test_a_second_writer_must_be_noticed_without_conditional_writes(rclone, saved, elsewhere):
    store = open_store("s3://bucket/x")
    saved.write("state.pt", b"first")
    elsewhere.write("state.pt", b"second")
    first, second = saved.copy(store), elsewhere.mirror(store, job="second-2")
    assert second.sync(never, final=True)
    saved.write("state.pt", b"third")
    with pytest.raises(StorageConflict, match="job 'second-2' also writes there"):
        first.sync(never, final=True)
    assert fetched(store, elsewhere) == {"state.pt": b"second"}


def test_a_manifest_whose_answer_was_lost_must_not_look_like_another_writers(moto, saved, elsewhere):
    store = open_store(moto)
    create = store.create

    def lose(key: str, data: bytes) -> None:
        create(key, data)
        raise StorageError("the connection was lost")

    saved.write("state.pt", b"1")
    mirror = saved.mirror(store)
    store.create = lose
    with pytest.raises(StorageError, match="lost"):
        mirror.sync(never, final=True)
    store.create = create
    assert mirror.sync(never, final=True)
    assert fetched(store, elsewhere) == {"state.pt": b"1"}


def test_what_is_read_must_be_counted_within_a_file_but_not_when_it_is_read_again(tmp_path, saved):
    store = open_store(f"file://{tmp_path}/store")
    saved.write("state.pt", bytes(8 * MIB))
    seen = []

    def refuse(key, size, chunks):
        for _ in chunks:
            seen.append(mirror.progress.count)
        raise StorageError("no")

    store.put_stream = refuse
    mirror = saved.mirror(store)
    for _ in range(2):
        with pytest.raises(StorageError, match="no"):
            mirror.sync(never, final=True)
    assert seen[0] > 8 * MIB and len({*seen[:8]}) > 5  # the first reading is for its digest
    assert {*seen[8:]} == {16 * MIB} == {mirror.progress.count}


def test_damaged_manifests_must_not_stay_in_memory(tmp_path):
    store = open_store(f"file://{tmp_path}/store")
    for number in range(1, 30):
        store.put(manifest_key(number), b" " * (4 * MIB))
    tracemalloc.start()
    with pytest.raises(Damaged, match="has no intact copy"):
        newest(store)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 24 * MIB
