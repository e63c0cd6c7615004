"""What a node removes for the next job must be this job's, and nothing else of the machine."""

import ctypes
import socket
from collections.abc import Iterator

import pytest

from orchestrate.node import wait
from orchestrate.node.wait import wipe


@pytest.fixture
def shm(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, list[tuple[int, ...]]]]:
    """A segment of System V's shared memory, and the calls that would have freed some."""
    libc, freed = ctypes.CDLL(None), []
    made = libc.shmget(0, 4096, 0o1600)  # IPC_PRIVATE, IPC_CREAT

    class Recorder:
        def shmctl(self, *arguments: int) -> None:
            freed.append(arguments)

    monkeypatch.setattr(wait.ctypes, "CDLL", lambda name: Recorder())
    yield made, freed
    libc.shmctl(made, 0, None)


def test_a_folder_must_be_emptied_but_for_sockets_and_what_links_lead_to(tmp_path, shm):
    made, freed = shm
    folder, outside = tmp_path / "tmp", tmp_path / "outside"
    (folder / "sub" / "deep").mkdir(parents=True)
    outside.mkdir()
    (outside / "mine").touch()
    (folder / "link").symlink_to(outside)
    (folder / "dangling").symlink_to("nowhere")
    (folder / "file").touch()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(folder / "node.sock"))
    wipe([str(tmp_path / "none"), str(folder)])
    assert [path.name for path in folder.iterdir()] == ["node.sock"]
    assert (outside / "mine").exists()
    assert (made, 0, None) in freed


def test_shared_memory_of_a_machine_must_be_left_alone_where_there_is_nothing_to_empty(shm):
    wipe([])
    assert shm[1] == []
