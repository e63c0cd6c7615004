"""One supervisor per job: a file lock that ends with its process, however that ends, in a folder that no node sees."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from orchestrate.files.paths import JobPaths

# struct flock of Linux and macOS: type, whence, start, length and the process id that the kernel fills in.
_FLOCK, _PID = ("hhqqi", 4) if sys.platform == "linux" else ("qqihh", 2)
_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True)
class Supervisor:
    """Whoever holds a job's lock; the process id is 0 where it is not proven to be a supervisor of ours."""

    pid: int
    started: str  # by which it differs from a later process of the same id

    def __str__(self) -> str:
        """For a person."""
        return f"process {self.pid}" if self.pid else "another process"

    def ask_to_stop(self) -> bool:
        """Send it SIGTERM; False where it has gone, or is not proven to be what it was when we looked."""
        if self.pid <= 1:
            return False
        with contextlib.suppress(ProcessLookupError):
            if not hasattr(os, "pidfd_open"):
                os.kill(self.pid, signal.SIGTERM)
                return True
            process = os.pidfd_open(self.pid)
            try:
                if _started(self.pid) == self.started:
                    signal.pidfd_send_signal(process, signal.SIGTERM)
                    return True
            finally:
                os.close(process)
        return False


@contextmanager
def held(paths: JobPaths) -> Iterator[None]:
    """Be the supervisor of a job; raises BlockingIOError where another process is."""
    with os.fdopen(os.open(paths.lock, _FLAGS | os.O_CREAT, 0o600), "r+b") as file:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.truncate()
        file.write(f"{os.getpid()} {_started(os.getpid())}".encode())
        file.flush()
        yield


def holder(paths: JobPaths) -> Supervisor | None:
    """A job's living supervisor, or None.

    That there is one is the kernel's word. That it is ours, and not some other process that has locked the file, is
    proven by what it has written there: the kernel gives the same process id, and that process began at the same time.
    """
    try:
        with os.fdopen(os.open(paths.lock, _FLAGS), "r+b") as file:
            pid = _locker(file)
            if pid is None:
                return None
            number, _, started = file.read(100).decode(errors="replace").partition(" ")
    except OSError:  # none, or one of somebody else's that we may not look at
        return None
    proven = pid > 1 and number == str(pid) and started and _started(pid) == started
    return Supervisor(pid if proven else 0, started)


def _locker(file: BinaryIO) -> int | None:
    """The process that has locked a file, or None: 0 in another process namespace, -1 for an open file's own lock."""
    values = {4: (fcntl.F_WRLCK, 0, 0, 0, 0), 2: (0, 0, 0, fcntl.F_WRLCK, 0)}[_PID]
    answer = struct.unpack(_FLOCK, fcntl.fcntl(file, fcntl.F_GETLK, struct.pack(_FLOCK, *values)))
    kind = answer[0] if _PID == 4 else answer[3]
    return None if kind == fcntl.F_UNLCK else int(answer[_PID])


def _started(pid: int) -> str:
    """When one of our own processes has started, in words of the system; empty where it has gone, or is not ours."""
    try:
        if sys.platform == "linux":
            path = Path(f"/proc/{pid}")
            if path.stat().st_uid != os.geteuid():
                return ""
            return path.joinpath("stat").read_text().rpartition(")")[2].split()[19]  # field 22 of proc(5)
        found = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid), "-U", str(os.geteuid())], capture_output=True)
        return found.stdout.decode().strip()
    except (OSError, IndexError):
        return ""
