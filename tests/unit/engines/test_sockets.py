"""Folders for the sockets of local nodes, and who may touch a job."""

import contextlib
import os
import stat
from pathlib import Path
from typing import cast

import pytest

from orchestrate.api import removal
from orchestrate.engines import base, sockets
from orchestrate.engines.base import JobState
from orchestrate.engines.process import ProcessEngine
from orchestrate.errors import EngineError, UsageError
from orchestrate.host import private


def taken(path: Path, how: str) -> None:
    """Put something that another user could have created in place of the socket folder."""
    if how == "a file":
        return path.touch()
    if how == "a link":
        return path.symlink_to(path.parent)
    path.mkdir(mode=0o700)
    if how == "open to others":
        return path.chmod(0o711)
    if os.getuid():
        pytest.skip("must be root to make a folder of another user")
    os.chown(path, 12345, 12345)


@pytest.mark.parametrize("how", ["a file", "a link", "another user's", "open to others"])
def test_a_socket_folder_that_is_not_ours_must_be_left_alone_and_must_not_block_jobs(tmp_path, monkeypatch, how):
    monkeypatch.setattr(private, "TEMPORARY", tmp_path)
    path = tmp_path / f"orchestrate-{os.geteuid()}"
    taken(path, how)
    engine = ProcessEngine()
    assert engine.state.parent == tmp_path and engine.state != path and engine.jobs() == []
    assert (engine.state.stat().st_uid, stat.S_IMODE(engine.state.stat().st_mode)) == (os.geteuid(), 0o700)
    assert not path.is_dir() or path.is_symlink() or not any(path.iterdir())
    assert private.temporary() == engine.state  # the same in every process
    assert not engine.state.is_symlink()


def test_folders_of_other_users_must_be_listed_once_and_not_opened(tmp_path, monkeypatch):
    monkeypatch.setattr(private, "TEMPORARY", tmp_path)
    name, opened, listed = f"orchestrate-{os.geteuid()}", [], []
    (tmp_path / name).touch()
    for number in range(100):
        (tmp_path / f"{name}-{number}").symlink_to("elsewhere")  # a link is not a folder, whoever owns it
    if os.getuid() == 0:
        for number in range(100, 200):
            (tmp_path / f"{name}-{number}").mkdir(mode=0o700)
            os.chown(tmp_path / f"{name}-{number}", 12345, 12345)
    own = tmp_path / f"{name}-x"
    own.mkdir(mode=0o700)
    real_open, real_list = os.open, os.scandir
    monkeypatch.setattr(os, "open", lambda path, *how, **more: opened.append(path) or real_open(path, *how, **more))
    monkeypatch.setattr(os, "scandir", lambda path: listed.append(path) or real_list(path))
    assert [private.temporary() for _ in range(3)] == [own] * 3
    assert len(opened) < 10 and listed == [tmp_path]
    own.rmdir()
    assert private.temporary() == own and stat.S_IMODE(own.stat().st_mode) == 0o700
    own.rmdir()
    own.symlink_to("elsewhere")
    assert (other := private.temporary()) != own and other.is_dir() and private.temporary() == other


def test_our_own_folder_must_be_found_without_listing_others(tmp_path, monkeypatch):
    monkeypatch.setattr(private, "TEMPORARY", tmp_path)
    monkeypatch.setattr(os, "scandir", lambda path: pytest.fail(f"{path} was listed"))
    assert private.temporary() == private.temporary() == tmp_path / f"orchestrate-{os.geteuid()}"


def test_the_socket_folder_must_be_private_to_its_user(tmp_path, monkeypatch):
    monkeypatch.setattr(private, "TEMPORARY", tmp_path)
    mask = os.umask(0)
    try:
        folder = private.temporary()
    finally:
        os.umask(mask)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert folder == tmp_path / f"orchestrate-{os.geteuid()}" == private.temporary()
    monkeypatch.setattr(private, "TEMPORARY", tmp_path / "none")
    with pytest.raises(EngineError, match="cannot create a folder for node sockets"):
        private.temporary()


@pytest.mark.parametrize(("setting", "top"), [("", ".cache"), ("relative", ".cache"), ("{home}/mine", "mine")])
def test_a_cache_must_be_below_the_home_folder_or_an_absolute_xdg_cache_home(tmp_path, monkeypatch, setting, top):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", setting.format(home=tmp_path))
    assert private.cache("data") == tmp_path / top / "orchestrate" / "data"


def test_the_folder_of_a_jobs_sockets_must_belong_to_the_nodes_also_when_some_are_replaced(tmp_path):
    before, user = len(os.listdir("/proc/self/fd")), (7, 8) if os.geteuid() == 0 else (os.geteuid(), os.getegid())
    for _ in range(2):
        sockets.share(tmp_path / "sockets", "{}:{}".format(*user))
    found = (tmp_path / "sockets").stat()
    assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (*user, 0o700)
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_link_in_place_of_the_folder_of_a_jobs_sockets_must_be_refused(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(EngineError, match="cannot create the folder for node sockets"):
        sockets.share(tmp_path / "link", "7:8")


def test_a_folder_of_a_jobs_sockets_that_cannot_be_removed_must_be_reported(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(EngineError, match=f"cannot remove {tmp_path}/file/sockets: Not a directory"):
        sockets.unshare(tmp_path / "file" / "sockets")


class Others:
    """An engine that runs a job of the given user."""

    def __init__(self, owner: int) -> None:
        self.owner = owner

    def jobs(self) -> list[JobState]:
        return [JobState("a-1", "docker", 2, Path("runs/a-1"), self.owner)]

    def resources(self, name: str) -> list[str]:
        return [f"container {name}-master"]


@pytest.mark.parametrize(
    ("user", "owner", "may"), [(1000, 1000, True), (1000, -1, True), (1000, 0, False), (0, 7, False)]
)
def test_only_the_owner_of_a_job_may_touch_it(monkeypatch, user, owner, may):
    monkeypatch.setattr(os, "getuid", lambda: user)
    with contextlib.nullcontext() if may else pytest.raises(UsageError, match=f"a-1 belongs to user {owner}"):
        assert removal.resources([cast(base.Engine, Others(owner))], "a-1")
