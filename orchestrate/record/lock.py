"""The lock that limits a job to one supervisor: it ends with the process, and nodes cannot see the file."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from orchestrate.clock import SYSTEM, wait_until
from orchestrate.dataclass import dataclass
from orchestrate.host import slurm
from orchestrate.host.processes import myself, named
from orchestrate.record import slurm_job
from orchestrate.record.paths import JobPaths
from orchestrate.record.slurm_job import Batch

# struct flock of Linux and macOS: type, whence, start, length, and the process id that the kernel fills in.
_FLOCK, _PID = ("hhqqi", 4) if sys.platform == "linux" else ("qqihh", 2)
_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True)
class Supervisor:
    """The process that holds a job's lock; the process id is 0 if it is not proven to be our supervisor."""

    pid: int
    name: str  # by `myself`, to detect a reused process id

    def __str__(self) -> str:
        """Describe it in messages."""
        return f"process {self.pid}" if self.pid else "another process"

    def waits(self) -> bool:
        """Return False: it has started, unlike a job in a queue."""
        return False

    def ask_to_stop(self) -> bool:
        """Send SIGTERM; return False if the process is gone, or is no longer the supervisor that was found.

        SIGCONT follows, or a process that Ctrl-Z has suspended would never see the first.
        """
        if self.pid <= 1:
            return False
        with contextlib.suppress(ProcessLookupError):
            if not hasattr(os, "pidfd_open"):
                os.kill(self.pid, signal.SIGTERM)
                os.kill(self.pid, signal.SIGCONT)
                return True
            process = os.pidfd_open(self.pid)
            try:
                if named(self.name) == self.pid:
                    signal.pidfd_send_signal(process, signal.SIGTERM)
                    signal.pidfd_send_signal(process, signal.SIGCONT)
                    return True
            finally:
                os.close(process)
        return False


OTHER = Supervisor(0, "")
LOOK_TIMEOUT = 0.2  # seconds for other processes to have looked whether a job has a supervisor
_held: set[Path] = set()  # run directories that this process has locked


@contextmanager
def _locked(paths: JobPaths) -> Iterator[None]:
    """Lock the run directory, too, since `git pull` can replace the file in it; raises BlockingIOError.

    As the lock of a file, it is no obstacle to this process itself.
    """
    if paths.root in _held:
        yield
        return
    folder = os.open(paths.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if not wait_until(lambda: _lock(folder), LOOK_TIMEOUT, SYSTEM, 0.01):  # `_is_locked` has it for a moment
            raise BlockingIOError(errno.EAGAIN, "locked by another process", str(paths.root))
        _held.add(paths.root)
        yield
    finally:
        _held.discard(paths.root)
        os.close(folder)


def _lock(folder: int) -> bool:
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # some network file systems lock no folders
        pass
    return True


def _is_locked(paths: JobPaths) -> bool:
    """Whether another process has locked the run directory."""
    if paths.root in _held:
        return False
    with contextlib.suppress(OSError):
        folder = os.open(paths.root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            return not _lock(folder)
        finally:
            os.close(folder)
    return False


def locker(paths: JobPaths) -> int:
    """Return the process that has locked the run directory, as far as Linux says so; otherwise 0."""
    with contextlib.suppress(OSError):
        inode = paths.root.lstat().st_ino
        for line in Path("/proc/locks").read_text().splitlines():
            words = line.split()
            if words[1] == "FLOCK" and words[5].endswith(f":{inode}"):
                return int(words[4])
    return 0


@contextmanager
def held(paths: JobPaths, supervises: bool = True) -> Iterator[None]:
    """Hold the lock of a job; raises BlockingIOError if another process holds it, OSError if it cannot be written.

    A process that does not supervise the job, but removes it for example, is not to be asked to stop.
    """
    with _locked(paths), os.fdopen(os.open(paths.lock, _FLAGS | os.O_CREAT, 0o600), "r+b", buffering=0) as file:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.truncate()
        if not supervises:
            yield
            return
        try:
            file.write(myself().encode())
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(paths.lock)) from None
        yield


def supervisor(paths: JobPaths) -> Supervisor | Batch | None:
    """Return the running supervisor of a job, or None.

    That of a job of Slurm runs on another machine: the queue knows it, since no lock can be trusted across machines.
    """
    submitted = slurm_job.of(paths)
    return slurm_job.holder(submitted) if submitted and not slurm.is_inside(submitted.id) else holder(paths)


def is_queued(paths: JobPaths) -> bool:
    """Whether the supervisor of a job waits in the queue of a scheduler."""
    return bool((found := supervisor(paths)) and found.waits())


def holder(paths: JobPaths) -> Supervisor | None:
    """Return the process on this machine that supervises a job, or None.

    The kernel reports whether the file is locked. The holder is proven to be a supervisor by the content of the file:
    it has the process id that the kernel reports, and the start time of that process.
    """
    try:
        with os.fdopen(os.open(paths.lock, _FLAGS), "r+b") as file:
            pid = _lock_owner(file)
            if pid is None:
                return OTHER if _is_locked(paths) else None
            text = file.read(100).decode(errors="replace")
    except OSError:  # missing, or of another user and not readable
        return OTHER if _is_locked(paths) else None
    return Supervisor(pid if pid == named(text) else 0, text)


def _lock_owner(file: BinaryIO) -> int | None:
    """Return the process that holds the lock, or None: 0 in another PID namespace, -1 for an open file description."""
    values = {4: (fcntl.F_WRLCK, 0, 0, 0, 0), 2: (0, 0, 0, fcntl.F_WRLCK, 0)}[_PID]
    answer = struct.unpack(_FLOCK, fcntl.fcntl(file, fcntl.F_GETLK, struct.pack(_FLOCK, *values)))
    kind = answer[0] if _PID == 4 else answer[3]
    return None if kind == fcntl.F_UNLCK else int(answer[_PID])
