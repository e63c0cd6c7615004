"""One supervisor per job: a file lock that ends with its process, however that ends."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager

from orchestrate.paths import JobPaths


@contextmanager
def held(paths: JobPaths) -> Iterator[None]:
    """Be the supervisor of a job; raises BlockingIOError where another process is."""
    with paths.lock.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def holder(paths: JobPaths) -> int:
    """The process id of a job's living supervisor, or 0."""
    try:
        with paths.lock.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return int(file.read() or 0)
    except FileNotFoundError:
        pass
    return 0
