"""A folder of this machine as an object store (`file://`), which may be in one that a job can write.

No link is followed, anywhere in its path: a job with a writable mount could lead the host to any other place.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from urllib.parse import quote, unquote

from orchestrate.errors import StorageConflict, StorageError, UsageError
from orchestrate.files.folder import ROOT
from orchestrate.host.writable import resolved
from orchestrate.storage.base import MAX_LEVELS, MAX_NAMES, MAX_OBJECTS, VARIABLES, Store, Version
from orchestrate.storage.parallel import interruptible
from orchestrate.storage.scan import is_sparse

NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
PIECE = 1 << 20  # bytes per read
MAX_KEY = 5000  # characters of a key that is listed, which is a path of at most 4,000 bytes below a prefix
BATCH = 1000  # files that are listed at a time
PART = ".orchestrate-part"  # end of the name of a file that is being written


class Local(Store):
    """The files of a folder, which is created if it does not exist."""

    def __init__(self, url: str, path: str) -> None:
        """`path` is that of the URL. Raises StorageError if the folder cannot be used."""
        super().__init__(url)
        self._top = unquote(path).strip("/")
        with self._errors(), ROOT.opened(self._top, make=True):
            pass

    def put(self, key: str, data: bytes) -> None:
        """Write a file at once."""
        self.put_stream(key, len(data), iter((data,)))

    def put_stream(self, key: str, size: int, chunks: Iterator[bytes]) -> None:
        """Write a file from its pieces."""
        with self._errors(key):
            interruptible(self._write, key, chunks)

    def create(self, key: str, data: bytes) -> None:
        """Write a file unless it exists; where there are no hard links, it is replaced."""
        with self._errors(key), contextlib.suppress(FileExistsError):
            interruptible(self._write, key, iter((data,)), False)

    def read(self, key: str) -> Iterator[bytes]:
        """Read a file in pieces."""
        with self._errors(key), interruptible(ROOT.open, self._path(key)) as file:
            if is_sparse(os.fstat(file.fileno())):
                raise StorageError(f"{self.url}/{key} is a sparse file, which is not read", "remove it")
            while piece := interruptible(file.read, PIECE):
                yield piece

    def all(self, below: str) -> Iterator[Version]:
        """List the regular files."""
        files = self._files(below)
        with self._errors(below):
            while batch := interruptible(list, islice(files, BATCH)):
                yield from batch

    def delete(self, keys: Iterable[str]) -> None:
        """Remove files, and the folders in which they were the last ones."""
        for key in keys:
            with self._errors(key), contextlib.suppress(FileNotFoundError):
                interruptible(self._remove, key)

    def _path(self, key: str) -> str:
        return f"{self._top}/{key}".rstrip("/")

    def _write(self, key: str, chunks: Iterator[bytes], replace: bool = True) -> None:
        """Write a file, which appears with all of its content; raises FileExistsError unless it may be replaced."""
        parent, _, name = self._path(key).rpartition("/")
        with ROOT.opened(parent, make=True) as folder:
            part = f".{secrets.token_hex(8)}{PART}"
            try:
                with os.fdopen(os.open(part, NEW, 0o666, dir_fd=folder), "wb") as file:
                    for chunk in chunks:
                        file.write(chunk)
                if replace or not _linked(part, name, folder):
                    os.rename(part, name, src_dir_fd=folder, dst_dir_fd=folder)
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(part, dir_fd=folder)

    def _files(self, below: str) -> Iterator[Version]:
        pending, entries_left, names_left = [below], 2 * MAX_OBJECTS, MAX_NAMES
        while pending:
            here = pending.pop()
            with contextlib.ExitStack() as stack:
                stack.enter_context(contextlib.suppress(FileNotFoundError))  # there is none, or it was removed
                folder = stack.enter_context(ROOT.opened(self._path(here)))
                for entry in stack.enter_context(os.scandir(folder)):
                    key = f"{here}/{entry.name}" if here else entry.name
                    entries_left -= 1
                    if entries_left < 0 or names_left < 0:
                        raise StorageError(f"{self.url} holds too many folders", "use an empty prefix")
                    if len(key) > MAX_KEY:
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        if key.count("/") <= MAX_LEVELS:
                            names_left -= sys.getsizeof(key)
                            pending.append(key)
                    elif entry.is_file(follow_symlinks=False) and not entry.name.endswith(PART):
                        try:
                            status = entry.stat(follow_symlinks=False)
                        except FileNotFoundError:  # it was removed
                            continue
                        yield Version(key, status.st_size, f"{status.st_ino} {status.st_mtime_ns}")

    def _remove(self, key: str) -> None:
        """Remove a file, and the folders in which it was the last one."""
        parent, _, name = self._path(key).rpartition("/")
        with ROOT.opened(parent) as folder:
            os.unlink(name, dir_fd=folder)
        with contextlib.suppress(OSError):  # a folder is not empty
            while parent != self._top:
                parent, _, name = parent.rpartition("/")
                with ROOT.opened(parent) as folder:
                    os.rmdir(name, dir_fd=folder)

    @contextlib.contextmanager
    def _errors(self, key: str = "") -> Iterator[None]:
        where = f"{self.url}/{key}" if key else self.url
        try:
            yield
        except FileNotFoundError:
            raise StorageError(
                f"{where} does not exist", "check the URL; if it was removed meanwhile, run again"
            ) from None
        except (OSError, ValueError) as error:
            path = Path("/", self._path(key))
            if link := next((each for each in (*reversed(path.parents), path) if each.is_symlink()), None):
                own = Path("/", self._top).is_relative_to(link)  # in the URL
                hint = "remove it"
                with contextlib.suppress(UsageError):  # raised for a link that a job may have made
                    hint = f"use the folder itself: file://{quote(str(resolved(str(link))))}" if own else hint
                raise StorageConflict(f"{where}: {link} is a link, which a job may have made", hint) from None
            why = getattr(error, "strerror", None) or error
            full = getattr(error, "errno", 0) in (errno.ENOSPC, errno.EDQUOT)
            hint = "free disk space" if full else f"check {VARIABLES['file']}"
            raise StorageError(f"{where}: {why}", hint) from None


def _linked(part: str, name: str, folder: int) -> bool:
    """Give a file another name; return False where that is not possible. Raises FileExistsError.

    A link that a job puts in place of the file is not followed: its target would get the name.
    """
    try:
        os.link(part, name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
    except FileExistsError:
        raise
    except OSError:
        return False
    return True
