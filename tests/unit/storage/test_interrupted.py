"""Copies that are interrupted must continue, and be fetched as a whole or not at all."""

import functools
import itertools
import os
import signal
import threading

import pytest
from support.object_stores import BIG, MIB, Trigger, fetched, run_mirror
from support.optional import not_none
from support.waiting import eventually

from orchestrate.errors import StorageError, StorageLost
from orchestrate.files.log_file import LOGGER
from orchestrate.storage.fetch import fetch, never, restore, retry
from orchestrate.storage.manifest import contents, manifest_key, newest
from orchestrate.storage.parallel import AT_ONCE, Stopped, each
from orchestrate.storage.store import open_store

LONG = 1100  # failed rounds in an outage: about nine hours; a float overflows if it is doubled so often


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["file", pytest.param("rclone", marks=pytest.mark.exhaustive)])
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
@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.exhaustive)])  # a third of them have each kind
def test_a_server_that_is_killed_before_any_request_must_get_everything_once_it_is_back(
    rclone, saved, elsewhere, every
):
    """The same process continues, and leaves nothing behind that is not needed."""
    for limit in range(every, 100, every):
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
    assert (state.complete, state.pending_files, state.pending_bytes) == (True, 0, 0)
    assert (state.error, state.hint) == ("", "")
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


def test_retries_must_not_wait_long_once_the_job_has_ended(tmp_path, saved, elsewhere, monkeypatch, caplog):
    caplog.set_level("WARNING", logger=LOGGER.name)
    monkeypatch.setattr("orchestrate.storage.mirror.FIRST_RETRY", 3600.0)
    monkeypatch.setattr("orchestrate.storage.mirror.MAX_RETRY", 3600.0)
    monkeypatch.setattr("orchestrate.storage.mirror.LAST_RETRY", 0.0)
    store = open_store(f"file://{tmp_path}/store")
    put, attempts = store.put, itertools.count(1)

    def fails_three_times(key: str, data: bytes) -> None:
        if (attempt := next(attempts)) <= 3:
            raise KeyError("a bug") if attempt == 1 else StorageLost("overloaded")
        put(key, data)

    store.put = fails_three_times
    saved.write("a", b"1")
    mirror = saved.mirror(store, interval=0.0)
    mirror.start()
    eventually(lambda: mirror.state.error == "KeyError: 'a bug'")  # and waits
    mirror.finish()
    eventually(lambda: mirror.finished, 60)
    assert mirror.state.complete and next(attempts) == 5
    logged = [(record.getMessage(), bool(record.exc_info)) for record in caplog.records]
    assert logged == [("KeyError: 'a bug'", True), ("overloaded", False)]  # each once
    assert fetched(store, elsewhere) == saved.files()


def test_rounds_after_a_long_outage_must_be_as_far_apart_as_before(tmp_path, saved, monkeypatch):
    monkeypatch.setattr("orchestrate.storage.mirror.FIRST_RETRY", 0.0)
    mirror = saved.mirror(open_store(f"file://{tmp_path}/store"), interval=3600.0)
    ended, rounds = threading.Event(), list[bool]()

    def sync(stopped, final: bool) -> bool:
        rounds.append(ended.is_set())
        if len(rounds) <= LONG:
            raise StorageLost("away")
        return True

    mirror.sync = sync
    mirror.start()
    eventually(lambda: len(rounds) > LONG)
    ended.set()
    mirror.finish()
    eventually(lambda: mirror.finished)
    assert rounds[LONG:] == [False, True]  # the last one as the job has ended


def test_what_is_written_during_the_last_round_must_be_copied_too(tmp_path, saved, elsewhere):
    store = open_store(f"file://{tmp_path}/store")
    mirror, put = saved.mirror(store, interval=0.0), store.put

    def puts(key: str, data: bytes) -> None:
        saved.write("b", b"2")
        mirror.finish()
        put(key, data)

    store.put = puts
    saved.write("a", b"1")
    mirror.start()
    eventually(lambda: mirror.finished)
    assert mirror.state.complete and fetched(store, elsewhere) == {"a": b"1", "b": b"2"}


def test_a_job_must_end_although_the_store_hangs(rclone, saved):
    store = open_store("s3://bucket/x")
    saved.write("a", b"1")
    rclone.hang()
    mirror = saved.mirror(store)
    mirror.start()
    state = mirror.close(0.2)
    assert not state.complete and state.error == "copying was stopped before all files were copied"
    not_none(rclone.process).send_signal(signal.SIGCONT)
    thread = not_none(mirror._thread)
    thread.join(300)
    assert not thread.is_alive()


def test_a_copy_that_is_stopped_must_keep_its_message_and_no_process_from_exiting(tmp_path, saved):
    store, gate, waiting = open_store(f"file://{tmp_path}/store"), threading.Event(), threading.Event()

    def wait(key: str, data: bytes) -> None:
        waiting.set()
        gate.wait()

    store.put = wait
    for number in range(AT_ONCE + 1):
        saved.write(str(number), b"1")
    before, mirror = threading.enumerate(), saved.mirror(store)
    mirror.finish()
    mirror.start()
    assert waiting.wait(20)
    assert all(thread.daemon for thread in threading.enumerate() if thread not in before)
    state = mirror.close(0)
    gate.set()
    eventually(lambda: mirror.finished)
    assert mirror.state.error == state.error == "copying was stopped before all files were copied"


def test_ctrl_c_must_end_the_work_on_several_files():
    gate, begun, before = threading.Event(), list[int](), threading.enumerate()

    def work(item: int) -> None:
        begun.append(item)
        if item == AT_ONCE - 1:
            signal.pthread_kill(not_none(threading.main_thread().ident), signal.SIGINT)
        gate.wait(20)

    with pytest.raises(KeyboardInterrupt):
        each(work, range(100), never)
    threads = {*threading.enumerate()}.difference(before)
    gate.set()
    for thread in threads:
        thread.join()
    assert sorted(begun) == [*range(AT_ONCE)] and all(thread.daemon for thread in threads)


def test_a_copy_that_is_asked_to_stop_must_stop(rclone, saved):
    store = open_store("s3://bucket/x")
    saved.write("big", os.urandom(BIG))
    asked = iter(range(80))
    with pytest.raises(Stopped):
        saved.mirror(store).sync(lambda: next(asked, None) is None, final=True)
    assert not list(store.list("files"))


@pytest.mark.parametrize("who", ["job 'second-2'", "another program"])
def test_a_conflict_must_end_the_thread(tmp_path, saved, elsewhere, who):
    store = open_store(f"file://{tmp_path}/store")
    mirror = saved.mirror(store, interval=0.05)
    saved.write("a", b"1")
    mirror.start()
    eventually(lambda: mirror.state.committed)
    elsewhere.write("b", b"2")
    if who == "another program":
        store.put(manifest_key(2), b"?")
    else:
        elsewhere.mirror(store, job="second-2").sync(never, final=True)
    saved.write("a", b"3")
    not_none(mirror._thread).join(300)
    assert f"{who} also writes there" in mirror.close(0).error


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


def test_deletions_must_not_delay_new_files(tmp_path, saved, monkeypatch):
    store = open_store(f"file://{tmp_path}/store")
    mirror = saved.mirror(store)
    monkeypatch.setattr("orchestrate.storage.mirror.MAX_DELETING", -1.0)
    for content in (b"1", b"2", b"3"):
        saved.write("a", content)
        assert mirror.sync(never, final=True)
    assert len(contents(store).objects) == 3
    monkeypatch.undo()
    saved.write("a", b"4")
    assert mirror.sync(never, final=True)
    assert len(contents(store).objects) == 2


def test_a_fetch_that_is_asked_to_stop_must_not_wait_for_the_end_of_an_outage():
    attempts: list[StorageLost] = []

    def fails() -> None:
        raise StorageLost("down")

    with pytest.raises(Stopped):
        retry(fails, lambda: True, attempts.append)
    assert len(attempts) == 1


def test_a_fetch_must_fail_after_a_long_outage(rclone, saved, elsewhere, monkeypatch):
    monkeypatch.setattr("orchestrate.storage.fetch.PATIENCE", 0.0)
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
