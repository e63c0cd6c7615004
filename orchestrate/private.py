"""Folders of this user alone, which no other user can have made or can look into."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from orchestrate.errors import EngineError
from orchestrate.node.trees import FOLDER

TEMPORARY = Path("/tmp")  # not $TMPDIR: a path of a socket has 104 characters at most, and is the same in every shell


def temporary() -> Path:
    """The user's folder in /tmp, made if need be; another user who has taken its name only makes it a longer one.

    Raises EngineError where it cannot be made.
    """
    name = f"orchestrate-{os.geteuid()}"
    for path in (TEMPORARY / name, *sorted(TEMPORARY.glob(f"{name}-*"))):
        with contextlib.suppress(OSError):
            with contextlib.suppress(FileExistsError):
                path.mkdir(mode=0o700)
            with opened(path):
                return path
    try:
        return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=TEMPORARY))
    except OSError as error:
        raise EngineError(f"no folder for the sockets of nodes in {TEMPORARY}: {error.strerror}") from None


def make(path: Path) -> None:
    """Make a folder, and those above it, where they are missing and belong below a folder of this user.

    Raises OSError. A root that has kept the home folder of the user who called sudo makes nothing there.
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
    """A descriptor of a folder; raises OSError for a link, and for a folder that is not this user's alone."""
    descriptor = os.open(path, FOLDER)
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise PermissionError(errno.EPERM, "the folder is not this user's alone", str(path))
        yield descriptor
    finally:
        os.close(descriptor)
