"""Private folders, which only this user can enter."""

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

TEMPORARY = Path("/tmp")  # not $TMPDIR: socket paths are limited to 104 characters, and must not depend on the shell


def temporary() -> Path:
    """Return the user's folder in /tmp, created if necessary; its name is longer if another user has taken the first.

    Raises EngineError if it cannot be created.
    """
    path = TEMPORARY / f"orchestrate-{os.geteuid()}"
    try:
        if _is_private(path):
            return path
        if not _is_private(_alternative(path)):  # no longer
            _alternative.cache_clear()
        return _alternative(path)
    except OSError as error:
        what = f"cannot create a folder for node sockets in {TEMPORARY}: {error.strerror}"
        raise EngineError(what, f"chmod 1777 {TEMPORARY}" if error.errno == errno.EACCES else "") from None


def cache(kind: str) -> Path:
    """Return the folder of a kind of cached files, which may not exist yet: in XDG_CACHE_HOME or `~/.cache`."""
    folder = os.environ.get("XDG_CACHE_HOME", "")
    top = Path(folder) if os.path.isabs(folder) else Path(os.path.expanduser("~"), ".cache")
    return top / "orchestrate" / kind


def make(path: Path) -> None:
    """Create a folder and missing parents, if the first existing parent belongs to this user.

    Raises OSError. So root creates nothing in the home directory of the user who called sudo.
    """
    if os.path.lexists(path):
        return
    make(path.parent)
    if path.parent.stat().st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, "the folder belongs to another user", str(path.parent))
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[int]:
    """Open a folder; raises OSError for a link, and for a folder that others own or can enter."""
    descriptor = os.open(path, FOLDER)
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise PermissionError(errno.EPERM, "the folder is not private to this user", str(path))
        yield descriptor
    finally:
        os.close(descriptor)


def _is_private(path: Path) -> bool:
    """Whether a folder is private to this user; it is created if missing."""
    with contextlib.suppress(OSError):
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        with opened(path):
            return True
    return False


@functools.cache
def _alternative(path: Path) -> Path:
    """Return this user's folder if another user has taken its name, created if necessary; raises OSError.

    Others may have created any number of such folders, which are skipped by their owner, once per process.
    """
    with os.scandir(path.parent) as entries:
        names = [entry.name for entry in entries if entry.name.startswith(f"{path.name}-") and _is_own_folder(entry)]
    found = filter(_is_private, (path.with_name(name) for name in sorted(names)))
    return next(found, None) or Path(tempfile.mkdtemp(prefix=f"{path.name}-", dir=path.parent))


def _is_own_folder(entry: os.DirEntry[str]) -> bool:
    """Whether an entry is a folder of this user."""
    with contextlib.suppress(OSError):
        return entry.is_dir(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_uid == os.geteuid()
    return False
