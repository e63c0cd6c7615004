"""Whether a worker of a job is being debugged: it does nothing then, and the job must not count as hung."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator

from orchestrate.record.paths import JobPaths

FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC


@contextlib.contextmanager
def held(paths: JobPaths) -> Iterator[None]:
    """Debug a worker during a `with` block, or until this process ends; raises OSError."""
    file = os.open(paths.debugged, FLAGS | os.O_CREAT, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_SH)
        yield
    finally:
        os.close(file)


def now(paths: JobPaths) -> bool:
    """Return whether a worker is being debugged."""
    try:
        file = os.open(paths.debugged, FLAGS)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False
