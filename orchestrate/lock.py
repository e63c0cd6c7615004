"""One supervisor per job: a file lock that ends with its process, however that ends."""

from __future__ import annotations

import fcntl
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from orchestrate.paths import JobPaths

# struct flock of Linux and macOS: type, whence, start, length and the process id that the kernel fills in.
_FLOCK, _PID = ("hhqqi", 4) if sys.platform == "linux" else ("qqihh", 2)


@contextmanager
def held(paths: JobPaths) -> Iterator[None]:
    """Be the supervisor of a job; raises BlockingIOError where another process is."""
    with paths.lock.open("a+") as file:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def holder(paths: JobPaths) -> int:
    """The process id of a job's living supervisor, or 0; the kernel says so, not the file, which a job can write."""
    values = {4: (fcntl.F_WRLCK, 0, 0, 0, 0), 2: (0, 0, 0, fcntl.F_WRLCK, 0)}[_PID]
    try:
        with paths.lock.open() as file:
            answer = struct.unpack(_FLOCK, fcntl.fcntl(file, fcntl.F_GETLK, struct.pack(_FLOCK, *values)))
    except OSError:  # none, or one of somebody else's that we may not look at
        return 0
    kind = answer[0] if _PID == 4 else answer[3]
    return 0 if kind == fcntl.F_UNLCK else int(answer[_PID])
