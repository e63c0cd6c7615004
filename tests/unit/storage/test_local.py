"""A folder as an object store, in which a job may have put links."""

import os

import pytest

from orchestrate.errors import StorageError
from orchestrate.storage.store import open_store


@pytest.fixture
def store(tmp_path):
    return open_store(f"file://{tmp_path}/a%20b/store/")


@pytest.fixture
def host(tmp_path):
    """A folder that no job may reach."""
    folder = tmp_path / "host"
    folder.mkdir()
    (folder / "key").write_text("the host's")
    return folder


def everything(folder) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_objects_must_be_files_that_are_replaced_listed_and_deleted(store, tmp_path):
    store.put("x/y/one", b"1")
    store.put("x/y/one", b"23")
    store.put_stream("x/two", 3, iter((b"4", b"56")))
    assert sorted(store.list("")) == [("x/two", 3), ("x/y/one", 2)] and list(store.list("x/y")) == [("x/y/one", 2)]
    assert b"".join(store.read("x/two")) == b"456" and not [*store.list("none")]
    before = {version.key: version.tag for version in store.versions()}
    store.put("x/two", b"456")
    assert {version.key for version in store.versions() if before[version.key] != version.tag} == {"x/two"}
    store.delete(["x/y/one", "none"])
    assert everything(tmp_path / "a b" / "store") == ["x", "x/two"]
    store.delete(["x/two"])
    assert everything(tmp_path / "a b") == ["store"]


def test_an_object_that_exists_must_not_be_created_again(store, monkeypatch):
    store.create("one", b"1")
    store.create("one", b"2")
    assert b"".join(store.read("one")) == b"1"


def test_an_object_must_not_appear_before_it_is_complete(store, tmp_path):
    def pieces():
        yield b"1"
        assert not [*store.list("")]
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        store.put_stream("x/one", 2, pieces())
    assert everything(tmp_path / "a b" / "store") == ["x"]


def test_an_object_that_does_not_exist_must_be_named(store):
    with pytest.raises(StorageError, match="/a%20b/store/x/one does not exist"):
        next(store.read("x/one"))


@pytest.mark.parametrize("place", ["a b", "a b/store"])
def test_a_link_in_the_path_of_a_store_must_be_refused_with_the_folder_that_it_leads_to(place, tmp_path, host):
    (tmp_path / place).parent.mkdir(exist_ok=True)
    (tmp_path / place).symlink_to(host)
    with pytest.raises(StorageError, match=f"{tmp_path / place} is a link, which a job may have made") as caught:
        open_store(f"file://{tmp_path}/a%20b/store")
    assert caught.value.hint == f"use the folder itself: file://{host}"
    assert everything(host) == ["key"]


def test_a_link_that_a_job_puts_in_place_of_a_folder_must_lead_to_no_other_place(store, tmp_path, host):
    store.put("mine/one", b"1")
    os.rename(tmp_path / "a b/store/mine", tmp_path / "a b/store/moved")
    (tmp_path / "a b/store/mine").symlink_to(host)
    for act in (
        lambda: store.put("mine/key", b"1"),
        lambda: store.put_stream("mine/below/key", 1, iter((b"1",))),
        lambda: store.create("mine/new", b"1"),
        lambda: next(store.read("mine/key")),
        lambda: store.delete(["mine/key"]),
        lambda: [*store.list("mine")],
    ):
        with pytest.raises(StorageError, match="/store/mine is a link, which a job may have made") as caught:
            act()
        assert caught.value.hint == "remove it"
    assert [*store.list("")] == [("moved/one", 1)]
    assert everything(host) == ["key"] and (host / "key").read_text() == "the host's"


def test_a_link_in_place_of_an_object_must_be_replaced_and_not_read(store, tmp_path, host):
    (tmp_path / "a b/store/one").symlink_to(host / "key")
    assert not [*store.list("")]
    with pytest.raises(StorageError, match="one is a link"):
        next(store.read("one"))
    store.create("one", b"1")  # which exists
    store.put("one", b"2")
    assert b"".join(store.read("one")) == b"2" and (host / "key").read_text() == "the host's"


def test_a_pipe_in_place_of_an_object_must_not_be_read(store, tmp_path):
    os.mkfifo(tmp_path / "a b/store/one")
    assert not [*store.list("")]
    with pytest.raises(StorageError, match="not a regular file"):
        next(store.read("one"))


def test_a_link_that_a_job_puts_in_place_of_an_unfinished_object_must_not_be_followed(
    store, tmp_path, host, monkeypatch
):
    """Otherwise the host would give a file of its own another name, in a folder of the job."""
    linked = os.link

    def swap(part, *arguments, **options):
        (tmp_path / "a b/store" / part).unlink()
        (tmp_path / "a b/store" / part).symlink_to(host / "key")
        linked(part, *arguments, **options)

    monkeypatch.setattr(os, "link", swap)
    store.create("one", b"1")
    assert (host / "key").stat().st_nlink == 1
    with pytest.raises(StorageError, match="one is a link"):
        next(store.read("one"))


def test_a_sparse_object_must_not_be_read(store, tmp_path):
    store.put("one", b"")
    os.truncate(tmp_path / "a b/store/one", 2 << 30)
    with pytest.raises(StorageError, match="one is a sparse file"):
        next(store.read("one"))


def test_folders_of_any_depth_and_keys_of_any_length_must_cost_little(store, tmp_path, monkeypatch):
    monkeypatch.setattr("orchestrate.storage.local.MAX_KEY", 200)
    store.put("near/one", b"1")
    store.put("x" * 201, b"1")
    (tmp_path / "a b/store" / "/".join("d" * 100)).mkdir(parents=True)
    for folder in (tmp_path / "a b/store").rglob("d"):
        (folder / "file").touch()
    found = [version.key for version in store.versions()]
    assert "near/one" in found and 60 < len(found) < 70
    monkeypatch.setattr("orchestrate.storage.local.MAX_OBJECTS", 10)
    with pytest.raises(StorageError, match="holds too many folders"):
        [*store.versions()]


def test_a_file_that_vanishes_while_files_are_listed_must_not_hide_the_others(store, tmp_path, monkeypatch):
    monkeypatch.setattr("orchestrate.storage.local.BATCH", 1)
    for number in range(10):
        store.put(str(number), b"1")
    first, gone, *others = os.listdir(tmp_path / "a b/store")
    listed = store.versions()
    assert next(listed).key == first
    (tmp_path / "a b/store" / gone).unlink()
    assert {version.key for version in listed} == {*others}
