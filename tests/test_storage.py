"""Copies of checkpoints in an object store: complete, consistent, and continued after any interruption."""

import functools
import itertools
import os
import signal
import subprocess
import sys
import threading

import pytest
from conftest import ROOT, SCRIPTS, eventually
from support.object_stores import Trigger, fetched
from support.optional import not_none

from orchestrate.errors import StorageError, StorageLost
from orchestrate.storage.content import Changed, Content
from orchestrate.storage.fetch import fetch, never, restore
from orchestrate.storage.manifest import contents, newest
from orchestrate.storage.mirror import Conflict
from orchestrate.storage.parallel import Stopped
from orchestrate.storage.scan import Facts
from orchestrate.storage.store import open_store

MIB = 1 << 20
BIG = 64 * MIB


def run_mirror(store, saved, *arguments) -> subprocess.CompletedProcess:
    """Copy in another process."""
    command = [sys.executable, str(SCRIPTS / "mirror.py"), store.url, str(saved.path), *map(str, arguments)]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)


# --- what is copied


def test_files_must_arrive_on_another_machine_with_their_times_and_need_not_be_copied_again(store, saved, elsewhere):
    for number in range(1000):
        saved.write(f"step-{number % 7}/rank-{number}.pt", b"%d" % number)
    saved.write("step-0/.metadata", b"of torch's distributed checkpoints")
    saved.write("empty", b"")
    saved.write("big", os.urandom(BIG))
    saved.write("a b/ü#?%&+'\n.pt", b"odd")
    os.utime(saved.path / "empty", ns=(1, 1_234_567_890_123_456_789))
    mirror = saved.copy(store)
    assert mirror.state.files == 1004
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
    assert newest(store) is None
    assert mirror.sync(never)
    assert fetched(store, elsewhere) == {"state.pt": b"complete"}


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
    saved.copy(store)
    saved.clear()
    for _ in range(3):
        saved.copy(store)
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
    with pytest.raises(Conflict, match="job 'first-1' also writes there"):
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
    with pytest.raises(Conflict, match="job 'second-2' also writes there"):
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


# --- interruptions


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["file", "rclone"])
def test_a_process_that_is_killed_at_any_step_must_leave_a_complete_set(request, tmp_path, saved, elsewhere, kind):
    """Another process continues; in between, a job finds the old files or the new ones, never a mixture."""
    if kind == "rclone":
        request.getfixturevalue("rclone")
    first, second = {"a": b"1", "step/b": b"2"}, {"a": b"1!", "step/b": b"2", "big": os.urandom(6 * MIB)}
    for limit in range(1, 100):
        place = f"s3://bucket/{limit}" if kind == "rclone" else f"file://{tmp_path}/store/{limit}"
        store = open_store(place)
        for content in ({"a": b"0"}, first):
            saved.clear()
            for name, data in content.items():
                saved.write(name, data)
            saved.copy(store)
        for name, data in second.items():
            saved.write(name, data)
        killed = run_mirror(store, saved, limit)
        assert fetched(store, elsewhere) in (first, second)
        if killed.returncode == 0:
            break
        assert killed.returncode == -9, killed.stderr
        assert run_mirror(store, saved).returncode == 0
        assert fetched(store, elsewhere) == second
        saved.write("a", b"1!!")
        saved.copy(store)  # also removes what the killed process did not
        assert contents(store).sequences == {3, 4}
        assert len(contents(store).objects) == 4
    assert limit > 10  # two uploads, a manifest, a manifest and an object to remove, before and after each


def test_a_server_that_is_killed_during_an_upload_must_get_everything_once_it_is_back(rclone, saved, elsewhere):
    store = open_store("s3://bucket/x")
    saved.write("big", os.urandom(BIG))
    saved.write("small", b"small")
    mirror = saved.mirror(store)
    with pytest.raises(StorageError, match="does not respond"):
        mirror.sync(Trigger(64 + 40, rclone.kill), final=True)
    rclone.start()
    assert newest(store) is None
    assert mirror.sync(never, final=True)
    assert fetched(store, elsewhere) == saved.files()


@pytest.mark.slow
def test_a_server_that_is_killed_before_any_request_must_get_everything_once_it_is_back(rclone, saved, elsewhere):
    """The same process continues, and leaves nothing behind that is not needed."""
    for limit in range(1, 100):
        store, requests = open_store(f"s3://bucket/{limit}"), itertools.count(1)

        def counted(method, *arguments, limit=limit, requests=requests):
            if next(requests) == limit:
                rclone.kill()
            return method(*arguments)

        for name in ("put", "put_stream", "create", "read", "list", "delete"):
            setattr(store, name, functools.partial(counted, getattr(store, name)))
        mirror = saved.mirror(store)
        for step in range(3):
            saved.clear()
            saved.write(f"step-{step}/a", b"%d" % step)
            saved.write("big", os.urandom(6 * MIB))
            try:
                assert mirror.sync(never, final=True)
            except StorageLost:
                rclone.start()
                assert mirror.sync(never, final=True)
            if not rclone.process:  # it was killed while old files were removed, which is tried again after the next
                rclone.start()
        if next(requests) < limit:
            break
        saved.write("last", b"1")
        assert mirror.sync(never, final=True)
        assert fetched(store, elsewhere) == saved.files()
        assert contents(store).sequences == {3, 4} and len(contents(store).objects) == 3
    assert limit > 20


def test_an_outage_must_be_survived_in_the_background(rclone, saved, elsewhere):
    store = open_store("s3://bucket/x")
    mirror = saved.mirror(store, interval=0.05)
    mirror.start()
    saved.write("a", b"1")
    eventually(lambda: mirror.state.committed)
    rclone.kill()
    saved.write("a", b"2")
    eventually(lambda: "does not respond" in mirror.state.error)
    assert mirror.state.pending_files == 1 and not mirror.state.complete
    rclone.start()
    eventually(lambda: not mirror.state.error)
    saved.write("b", b"3")
    state = mirror.close(300)
    assert (state.complete, state.pending_files, state.pending_bytes, state.error) == (True, 0, 0, "")
    assert fetched(store, elsewhere) == {"a": b"2", "b": b"3"}
    assert not not_none(mirror._thread).is_alive()


def test_a_job_must_end_although_the_store_is_down(rclone, saved):
    store = open_store("s3://bucket/x")
    saved.write("a", b"1")
    rclone.kill()
    mirror = saved.mirror(store)
    mirror.start()
    eventually(lambda: mirror.state.error)
    state = mirror.close(0.2)
    assert not state.complete and "does not respond" in state.error
    thread = not_none(mirror._thread)
    thread.join(300)
    assert not thread.is_alive()


def test_a_job_must_end_although_the_store_hangs(rclone, saved):
    store = open_store("s3://bucket/x")
    saved.write("a", b"1")
    server = not_none(rclone.process)
    server.send_signal(signal.SIGSTOP)
    mirror = saved.mirror(store)
    mirror.start()
    state = mirror.close(0.2)
    assert not state.complete and state.error == "copying was stopped before all files were copied"
    server.send_signal(signal.SIGCONT)
    thread = not_none(mirror._thread)
    thread.join(300)
    assert not thread.is_alive()


def test_a_copy_that_is_asked_to_stop_must_stop(rclone, saved):
    store = open_store("s3://bucket/x")
    saved.write("big", os.urandom(BIG))
    asked = iter(range(80))
    with pytest.raises(Stopped):
        saved.mirror(store).sync(lambda: next(asked, None) is None, final=True)
    assert not list(store.list("files"))


def test_a_conflict_must_end_the_thread(tmp_path, saved, elsewhere):
    store = open_store(f"file://{tmp_path}/store")
    mirror = saved.mirror(store, interval=0.05)
    saved.write("a", b"1")
    mirror.start()
    eventually(lambda: mirror.state.committed)
    elsewhere.write("b", b"2")
    other = elsewhere.mirror(store, job="second-2")
    other.sync(never, final=True)
    saved.write("a", b"3")
    not_none(mirror._thread).join(300)
    assert "job 'second-2' also writes there" in mirror.close(0).error


# --- fetching


def test_a_fetch_that_is_interrupted_must_leave_no_part_of_the_files(rclone, saved, elsewhere):
    store = open_store("s3://bucket/x")
    saved.write("a", b"1")
    saved.write("big", os.urandom(BIG))
    saved.copy(store)
    manifest = not_none(newest(store))
    asked = iter(range(6))
    with pytest.raises(Stopped):
        fetch(store, manifest, elsewhere.folder, "checkpoints", lambda: next(asked, None) is None)
    assert [*elsewhere.path.parent.iterdir()] == [elsewhere.path] and not elsewhere.files()
    (elsewhere.path.parent / ".checkpoints.fetching" / "big").mkdir(parents=True)  # as after SIGKILL
    assert fetched(store, elsewhere) == saved.files()


def test_a_server_that_is_killed_during_a_fetch_must_be_waited_for(rclone, saved, elsewhere):
    store = open_store("s3://bucket/x")
    saved.write("big", os.urandom(BIG))
    saved.copy(store)
    manifest, stopped = not_none(newest(store)), Trigger(10, rclone.kill)
    read, attempts = store.read, []
    store.read = lambda key: attempts.append(key) or read(key)
    thread = threading.Thread(target=fetch, args=(store, manifest, elsewhere.folder, "checkpoints", stopped))
    thread.start()
    eventually(lambda: len(attempts) > 1)
    rclone.start()
    thread.join(300)
    assert elsewhere.files() == saved.files()


def test_a_fetch_must_fail_after_a_long_outage(rclone, saved, elsewhere, monkeypatch):
    monkeypatch.setattr("orchestrate.storage.fetch.TRIES", 2)
    monkeypatch.setattr("orchestrate.storage.fetch.RETRY_INTERVAL", 0.0)
    store = open_store("s3://bucket/x")
    saved.write("a", b"1")
    saved.copy(store)
    manifest = not_none(newest(store))
    rclone.kill()
    with pytest.raises(StorageLost, match="does not respond"):
        fetch(store, manifest, elsewhere.folder, "checkpoints")
    assert [*elsewhere.path.parent.iterdir()] == [elsewhere.path]


def test_progress_must_be_reported_for_each_file(tmp_path, saved, elsewhere):
    store = open_store(f"file://{tmp_path}/store")
    for number in range(5):
        saved.write(str(number), b"12345")
    saved.copy(store)
    seen: list[tuple[int, int]] = []
    restore(store, elsewhere.folder, "checkpoints", progress=lambda *numbers: seen.append(numbers))
    assert seen == [(number, number * 5) for number in range(1, 6)]


def test_a_folder_that_is_not_empty_must_not_be_replaced(tmp_path, saved, elsewhere):
    store = open_store(f"file://{tmp_path}/store")
    saved.write("a", b"1")
    saved.copy(store)
    elsewhere.write("mine", b"2")
    with pytest.raises(StorageError, match="it is not empty"):
        restore(store, elsewhere.folder, "checkpoints")
    assert elsewhere.files() == {"mine": b"2"}


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_fetched_files_must_belong_to_the_owner_of_the_folder(tmp_path, saved, elsewhere):
    store = open_store(f"file://{tmp_path}/store")
    saved.write("step/a", b"1")
    saved.copy(store)
    os.chown(elsewhere.path, 61001, 61002)
    elsewhere.path.chmod(0o750)
    restore(store, elsewhere.folder, "checkpoints")
    for path in (elsewhere.path, elsewhere.path / "step", elsewhere.path / "step" / "a"):
        assert (path.stat().st_uid, path.stat().st_gid) == (61001, 61002)
    assert elsewhere.path.stat().st_mode & 0o777 == 0o750


def test_nothing_must_be_fetched_from_an_empty_store(store, elsewhere):
    assert restore(store, elsewhere.folder, "checkpoints") is None
    assert newest(store) is None
