"""Before the next job, a node must remove only what the last job has left."""

import ctypes
import os
import socket
import stat
import subprocess
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from orchestrate.node import agent
from orchestrate.node import wipe as wipe_module
from orchestrate.node.agent import Agent
from orchestrate.node.wipe import free_ipc, wipe


@pytest.fixture
def ipc(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[dict[str, int], set[tuple[object, ...]]]]:
    """One System V IPC object of each kind, by kind, and the recorded calls that would free objects."""
    libc, freed = ctypes.CDLL(None), set()
    flags = 0o1600  # IPC_CREAT; the key 0 is IPC_PRIVATE
    ids = {"shmctl": libc.shmget(0, 4096, flags), "msgctl": libc.msgget(0, flags), "semctl": libc.semget(0, 1, flags)}

    class Recorder:
        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda *arguments: freed.add((name, *arguments))

    monkeypatch.setattr(wipe_module.ctypes, "CDLL", lambda name: Recorder())
    yield ids, freed
    libc.shmctl(ids["shmctl"], 0, None), libc.msgctl(ids["msgctl"], 0, None), libc.semctl(ids["semctl"], 0, 0)


def test_a_folder_must_be_emptied_except_the_nodes_sockets_and_link_targets(tmp_path):
    folder, outside = tmp_path / "tmp", tmp_path / "outside"
    (folder / "sub" / "deep").mkdir(parents=True)
    outside.mkdir()
    (outside / "mine").touch()
    (folder / "link").symlink_to(outside)
    (folder / "dangling").symlink_to("nowhere")
    (folder / "file").touch()
    for name in ("node.sock", "of-a-worker.sock"):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(str(folder / name))
    os.link(folder / "node.sock", folder / "inductor")  # a name that the next job might use
    wipe([str(tmp_path / "none"), str(folder)], {str(folder / "node.sock"), str(outside / "file")})
    assert [path.name for path in folder.iterdir()] == ["node.sock"]
    assert (outside / "mine").exists()


@pytest.mark.skipif(os.getuid() != 0, reason="must be root to mount a folder")
def test_what_is_mounted_in_a_folder_must_stay(tmp_path):
    mine, volume = tmp_path / "mine", tmp_path / "deep" / "volume"
    for folder in (mine, volume / "mount", volume / "left"):
        folder.mkdir(parents=True)
    (mine / "file").touch()
    (tmp_path / "alias").symlink_to(tmp_path / "deep")
    subprocess.run(["mount", "--bind", mine, volume / "mount"], check=True)
    try:
        wipe([str(tmp_path / "alias" / "volume")], {})  # as the image may name it
        assert [path.name for path in volume.iterdir()] == ["mount"] and (mine / "file").exists()
        for folder in (tmp_path / "deep", tmp_path):
            with pytest.raises(OSError, match=f"volume/mount is mounted in {folder}"):
                wipe([str(folder)], {})
        assert (mine / "file").exists()
        wipe([str(volume), str(volume / "mount")], {})  # a volume in a volume
        assert not (mine / "file").exists()
    finally:
        subprocess.run(["umount", volume / "mount"], check=True)


def test_system_v_ipc_objects_must_be_freed(ipc):
    ids, freed = ipc
    free_ipc()
    expected = {
        ("shmctl", ids["shmctl"], 0, None),
        ("msgctl", ids["msgctl"], 0, None),
        ("semctl", ids["semctl"], 0, 0),
    }
    assert expected <= freed


def test_files_that_cannot_be_removed_must_be_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(wipe_module, "clear", lambda folder, keep: ["a", "gone"])
    (tmp_path / "a").symlink_to("nowhere")
    with pytest.raises(OSError, match="1 files of the job cannot be removed"):
        wipe([str(tmp_path)], set())
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    wipe([str(tmp_path)], set())  # part of the image: the worker cannot have created it


def test_a_socket_must_not_appear_before_it_accepts_connections(tmp_path, monkeypatch):
    path, seen = tmp_path / "s", []

    class Slow(socket.socket):
        def listen(self, backlog: int = 0, /) -> None:
            seen.append(path.exists())
            super().listen(backlog)

    monkeypatch.setattr(agent, "Listener", lambda loop, server, receive, key: server)
    monkeypatch.setattr(agent.socket, "socket", Slow)
    idle: Any = SimpleNamespace()
    node = Agent(idle, b"")
    (tmp_path / "s~").touch()  # left by a node that was killed as it started
    for _ in range(2):  # the second time, as after a job that removed or replaced it
        node.listen(str(path), 0o600)
        assert stat.S_ISSOCK(path.lstat().st_mode) and path.lstat().st_mode & 0o777 == 0o600
        path.unlink()
    assert seen == [False, False]
    for server in cast(list[socket.socket], node.listeners):
        server.close()


@pytest.mark.parametrize("folders", ["", "/no/such/folder"])
def test_shared_memory_must_be_kept_if_there_are_no_folders_to_wipe(folders, monkeypatch):
    freed: list[str] = []
    monkeypatch.setattr(agent, "kill", lambda workers, number: None)
    monkeypatch.setattr(agent, "free_ipc", lambda: freed.append("all"))
    monkeypatch.setenv("NODE_WIPE", folders)
    loop: Any = SimpleNamespace(workers=[], finish=lambda: None, changed=lambda: False)
    assert Agent(loop, b"").clean()
    assert freed == ["all"] * bool(folders)
