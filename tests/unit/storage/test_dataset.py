"""Data of a job in an object store, fetched into a cache."""

import fcntl
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.methods import raising
from support.object_stores import URL, Server

from orchestrate.errors import StorageError, StorageLost
from orchestrate.spec.folders import cached_data
from orchestrate.storage import dataset
from orchestrate.storage.base import Version
from orchestrate.storage.store import open_store


def fetched() -> dict[str, str]:
    folder = cached_data(URL)
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_a_server_that_is_killed_must_be_waited_for(bucket, rclone: Server, monkeypatch):
    from orchestrate.storage import fetch

    monkeypatch.setattr(fetch, "RETRY_INTERVAL", 0.5)
    for number in range(20):
        (bucket / f"n{number}").write_text(str(number))
    begun, killed = threading.Event(), threading.Event()

    def progress(files: int, size: int) -> None:
        begun.set()
        killed.wait(60)

    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(dataset.fetch, open_store(URL), progress)
        assert begun.wait(60)
        rclone.kill()
        killed.set()
        rclone.start()
        assert result.result(60) == (22, 2 + 10 + 20)
    assert len(fetched()) == 22


def test_an_interrupted_fetch_must_continue(bucket, monkeypatch):
    from orchestrate.storage import remote

    read, seen = remote.Remote.read, []

    def fails_at_second(self, key):
        seen.append(key)
        if len(seen) == 2:
            raise StorageError("no")
        return read(self, key)

    monkeypatch.setattr(remote.Remote, "read", fails_at_second)
    with pytest.raises(StorageError, match="no"):
        dataset.fetch(open_store(URL), lambda files, size: None)
    assert sorted(os.listdir(cached_data(URL).parent)) == ["files", "index.json", "lock"]  # no part of a file
    assert cached_data(URL).parent.stat().st_mode & 0o777 == 0o700
    count = len(fetched())
    assert dataset.fetch(open_store(URL), lambda files, size: None)[0] == 2 - count
    assert fetched() == {"a": "A", "sub/b": "B"}


@pytest.mark.parametrize("change", [os.unlink, lambda path: os.truncate(path, 0)], ids=["removed", "cut short"])
def test_a_cached_file_that_was_removed_or_cut_short_must_be_fetched_again(bucket, change):
    dataset.fetch(open_store(URL), lambda files, size: None)
    change(cached_data(URL) / "sub" / "b")
    assert dataset.fetch(open_store(URL), lambda files, size: None) == (1, 1)
    assert fetched() == {"a": "A", "sub/b": "B"}
    assert dataset.fetch(open_store(URL), lambda files, size: None) == (0, 0)


def test_only_one_run_at_a_time_must_fetch_the_same_data(bucket):
    refused: list[bool] = []

    def progress(files: int, size: int) -> None:
        with open(cached_data(URL).parent / "lock") as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        refused.append(True)

    dataset.fetch(open_store(URL), progress)
    assert refused == [True, True]


@pytest.mark.parametrize("key", ["../evil", "/evil", "a/../../evil", "a//b", "a\nb", "."])
def test_names_that_lead_elsewhere_must_be_refused(key, bucket, monkeypatch, tmp_path):
    from orchestrate.storage import remote

    monkeypatch.setattr(remote.Remote, "versions", lambda self: iter([remote.Version(key, 1, "x")]))
    with pytest.raises(StorageError, match="which is not a path"):
        dataset.fetch(open_store(URL), lambda files, size: None)
    assert not (tmp_path / "evil").exists() and not fetched()


@pytest.fixture
def objects(bucket, monkeypatch):
    """Objects of the bucket by key, with any names."""
    from orchestrate.storage import remote

    found: dict[str, str] = {}
    versions = lambda self: iter([remote.Version(key, len(text), text) for key, text in found.items()])  # noqa: E731
    monkeypatch.setattr(remote.Remote, "versions", versions)
    monkeypatch.setattr(remote.Remote, "read", lambda self, key: iter([found[key].encode()]))
    return found


def test_a_file_and_a_folder_must_be_able_to_replace_each_other_and_no_empty_folder_stay(objects):
    for now in ({"a": "1", "b/c/d": "2"}, {"a/x/y": "3", "b": "4"}, {"a": "5"}, {"a": "6"}):
        objects.clear()
        objects.update(now)
        dataset.fetch(open_store(URL), lambda files, size: None)
        assert fetched() == now
    assert os.listdir(cached_data(URL)) == ["a"]
    with (cached_data(URL) / "a").open() as file:
        objects["a"] = "7"
        dataset.fetch(open_store(URL), lambda files, size: None)
        assert file.read() == "6"  # a job that reads a file keeps its version


def test_an_outage_must_be_reported_before_a_file_is_tried_again(objects, monkeypatch):
    monkeypatch.setattr("orchestrate.storage.fetch.RETRY_INTERVAL", 0.0)
    objects.update({"a": "1"})
    store, outages = open_store(URL), []
    read = store.read

    def fails_once(key: str):
        if not outages:
            raise StorageLost("down")
        return read(key)

    store.read = fails_once
    assert dataset.fetch(store, lambda files, size: None, outages.append) == (1, 1) and str(outages[0]) == "down"


def test_a_file_that_could_not_be_fetched_must_be_fetched_by_the_next_run(objects):
    objects["a"] = "1"
    dataset.fetch(open_store(URL), lambda files, size: None)
    objects["a"], failing = "2", open_store(URL)
    failing.read = raising(StorageError("access denied"))
    with pytest.raises(StorageError, match="access denied"):
        dataset.fetch(failing, lambda files, size: None)
    assert dataset.fetch(open_store(URL), lambda files, size: None) == (1, 1) and fetched() == {"a": "2"}


def test_an_object_that_marks_a_folder_must_be_ignored(objects):
    objects.update({"a/": "", "a/b": "1"})
    assert dataset.fetch(open_store(URL), lambda files, size: None) == (1, 1)


def test_a_cache_that_cannot_be_created_must_be_reported(objects, tmp_path):
    objects.update({"a": "1"})
    (tmp_path / "cache").touch()
    with pytest.raises(StorageError, match=f"cannot fetch {URL} into {tmp_path}/cache/.*: Not a directory") as caught:
        dataset.fetch(open_store(URL), lambda files, size: None)
    assert caught.value.hint == "set XDG_CACHE_HOME"


def test_nodes_of_another_user_must_be_able_to_read_the_data_despite_a_umask(objects):
    objects.update({"a/b/c": "1"})
    earlier = os.umask(0o077)
    try:
        dataset.fetch(open_store(URL), lambda files, size: None)
    finally:
        os.umask(earlier)
    top = cached_data(URL)
    assert [oct(path.stat().st_mode & 0o777) for path in (top, *sorted(top.rglob("*")))] == ["0o755"] * 3 + ["0o644"]


def test_a_file_within_a_file_must_be_reported(objects):
    objects.update({"a": "1", "a/b": "2"})
    with pytest.raises(StorageError, match="has the object 'a', and others below that name"):
        dataset.fetch(open_store(URL), lambda files, size: None)


def test_what_a_killed_run_has_left_must_not_stay(objects):
    objects.update({"a": "1"})
    (cached_data(URL) / "sub").mkdir(parents=True)
    (cached_data(URL) / "sub" / "removed").touch()
    (cached_data(URL).parent / "fetching-1").touch()
    (cached_data(URL).parent / "index.json").write_text("{")
    dataset.fetch(open_store(URL), lambda files, size: None)
    assert fetched() == {"a": "1"} and not list(cached_data(URL).parent.glob("fetching-*"))


def test_an_empty_folder_must_be_reported(bucket):
    with pytest.raises(StorageError, match="has no objects"):
        dataset.fetch(open_store("s3://bucket/none"), lambda files, size: None)


def test_the_marker_of_a_folder_must_be_ignored(objects):
    objects.update({"p": "", "p/q": "", "p/q/a": "1", "empty": ""})
    dataset.fetch(open_store(URL), lambda files, size: None)
    assert fetched() == {"p/q/a": "1", "empty": ""}
    objects["p"] = "content"
    with pytest.raises(StorageError, match="has the object 'p', and others below that name"):
        dataset.fetch(open_store(URL), lambda files, size: None)


@pytest.mark.parametrize("content", [b"12", b"1234"])
def test_an_object_of_another_size_than_listed_must_be_refused(objects, monkeypatch, content):
    from orchestrate.storage import remote

    objects["a"] = "123"
    monkeypatch.setattr(remote.Remote, "read", lambda self, key: iter([content[:2], content[2:]]))
    with pytest.raises(StorageError, match="/a changed while it was fetched"):
        dataset.fetch(open_store(URL), lambda files, size: None)
    assert not fetched() and sorted(os.listdir(cached_data(URL).parent)) == ["files", "index.json", "lock"]


def test_objects_in_too_many_folders_must_be_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    store = open_store(f"file://{tmp_path}/store")
    store.all = lambda below: iter([Version("a/" * 65 + "b", 1, "tag")])
    with pytest.raises(StorageError, match="has an object in more than 64 folders: 'a/a/"):
        dataset.fetch(store, lambda *_: None)
