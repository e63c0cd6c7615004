"""Folders that belong to this user, and that no other user can enter."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from orchestrate.errors import EngineError
from orchestrate.node.trees import FOLDER

TEMPORARY = Path("/tmp")  # not $TMPDIR: a socket's path has 104 characters at most, and must be the same in every shell


def temporary() -> Path:
    """The user's folder in /tmp, created if necessary; its name is longer if another user has taken the first one.

    Raises EngineError if it cannot be created.
    """
    path = TEMPORARY / f"orchestrate-{os.geteuid()}"
    try:
        if _ours(path):
            return path
        if not _ours(_longer(path)):  # any more
            _longer.cache_clear()
        return _longer(path)
    except OSError as error:
        raise EngineError(f"no folder for the sockets of nodes in {TEMPORARY}: {error.strerror}") from None


def make(path: Path) -> None:
    """Create a folder and missing parents, if the first existing parent belongs to this user.

    Raises OSError. So root creates nothing in the home folder of the user who called sudo.
    """
    if os.path.lexists(path):
        return
    make(path.parent)
    if path.parent.stat().st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, "the folder is another user's", str(path.parent))
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[int]:
    """Open a folder; raises OSError for a link, and for a folder that others own or can enter."""
    descriptor = os.open(path, FOLDER)
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise PermissionError(errno.EPERM, "the folder is not this user's alone", str(path))
        yield descriptor
    finally:
        os.close(descriptor)


def _ours(path: Path) -> bool:
    """Whether a folder is this user's alone; it is made if it is missing."""
    with contextlib.suppress(OSError):
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        with opened(path):
            return True
    return False


@functools.cache
def _longer(path: Path) -> Path:
    """This user's folder where another user has taken its name, made if need be; raises OSError.

    Others can have made any number of such folders: they are passed over by their owner, once in a process.
    """
    with os.scandir(path.parent) as entries:
        names = [entry.name for entry in entries if entry.name.startswith(f"{path.name}-") and _own(entry)]
    found = filter(_ours, (path.with_name(name) for name in sorted(names)))
    return next(found, None) or Path(tempfile.mkdtemp(prefix=f"{path.name}-", dir=path.parent))


def _own(entry: os.DirEntry[str]) -> bool:
    """Whether it is a folder that this user has made."""
    with contextlib.suppress(OSError):
        return entry.is_dir(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_uid == os.geteuid()
    return False
