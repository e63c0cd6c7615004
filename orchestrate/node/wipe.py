"""What a job has left in a container is removed before the next one."""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
from collections.abc import Callable, Collection

from orchestrate.node.trees import clear

IPC_RMID = 0  # of shmctl(2), msgctl(2) and semctl(2)


def wipe(folders: list[str], kept: Collection[str]) -> None:
    """Empty folders except for the paths `kept` and what is mounted in them, such as a folder of the user.

    Raises OSError if files of a worker cannot be removed, or something is mounted further down.
    """
    with open("/proc/self/mountinfo") as file:
        mounted = {line.split()[4] for line in file}
    for folder in folders:
        with contextlib.suppress(FileNotFoundError):
            real = os.path.realpath(folder)  # the image may have links
            others = {
                os.path.relpath(path, real) for path in mounted.difference(folders) if path.startswith(f"{real}/")
            }
            if deep := next((name for name in others if "/" in name), ""):
                raise OSError(f"{deep} is mounted in {folder}")
            if not stat.S_ISDIR(os.lstat(folder).st_mode):  # the job has replaced the folder
                os.unlink(folder)
                continue
            names = others | {os.path.basename(path) for path in kept if os.path.dirname(path) == folder}
            if left := [name for name in clear(folder, names) if _ours(folder, name)]:
                raise OSError(f"{len(left)} files of the job cannot be removed from {folder}")


def _ours(folder: str, name: str) -> bool:
    """Whether a file belongs to our user, as files of workers do; files from the image may have another owner."""
    try:
        return os.lstat(f"{folder}/{name}").st_uid == os.geteuid()
    except FileNotFoundError:
        return False


def free_ipc() -> None:
    """Free all System V shared memory, queues and semaphores; only a container has its own."""
    libc = ctypes.CDLL(None)
    remove: dict[str, Callable[[int], object]] = {
        "shm": lambda number: libc.shmctl(number, IPC_RMID, None),
        "msg": lambda number: libc.msgctl(number, IPC_RMID, None),
        "sem": lambda number: libc.semctl(number, 0, IPC_RMID),
    }
    for kind, free in remove.items():
        with contextlib.suppress(FileNotFoundError), open(f"/proc/sysvipc/{kind}") as file:  # not in every kernel
            for line in file.read().splitlines()[1:]:
                free(int(line.split()[1]))
