"""Copying of one file from a node to the job folder; writes only below that folder, never through a link."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from pathlib import Path
from typing import BinaryIO

from orchestrate.errors import EngineError
from orchestrate.files.folder import MAX_DEPTH, Folder
from orchestrate.node.files import PIECE, Facts
from orchestrate.node.trees import data, opened

NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
MAX_COMPARED = 256 << 20  # bytes: other files wait meanwhile, and a larger file is copied once it has settled
MAX_PATH = os.pathconf("/", "PC_PATH_MAX")  # bytes of a path, including the terminating null


class Fetch:
    """A file that is being copied, under a hidden temporary name."""

    def __init__(self, run_dir: Folder, path: str, told: Facts, node: str) -> None:
        """Create the hidden file and missing folders; raises OSError."""
        self.run_dir, self.path, self.told = run_dir, path, told
        self.below, _, self.name = path.rpartition("/")
        self.temporary = _hidden(self.name, node)
        self.offset = 0  # of the next piece
        self.changed = False  # whether the original has changed meanwhile
        with run_dir.opened(self.below, make=True) as folder:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.temporary, dir_fd=folder)
            self.file = os.fdopen(os.open(self.temporary, NEW, 0o666, dir_fd=folder), "wb")

    def goes_on(self, facts: Facts | None) -> bool:
        """Whether the original with these facts may have the same beginning: it has only grown, as a log does."""
        self.changed = self.changed or facts != self.told
        return facts is not None and facts[2] == self.told[2] and facts[0] >= self.told[0]

    def write(self, data: bytes, offset: int) -> bool:
        """Write the next piece, after a hole if there is one; return whether it is the last.

        Raises OSError, and EngineError for bytes at a wrong offset.
        """
        if self.changed:  # what it has had at first
            offset = min(offset, self.told[0])
            data = data[: self.told[0] - offset]
        if not self.offset <= offset <= offset + len(data) <= max(offset, self.told[0]):
            raise EngineError("the node sent bytes at a wrong offset")
        self.file.seek(offset)
        self.file.write(data)
        self.offset = offset + len(data)
        return not data or self.offset == self.told[0]  # the rest is a hole

    def keep(self) -> bool:
        """Move the file to its place, with the modification time and executable bit of the original; raises OSError.

        Returns False for an original that has changed, unless this adds to the file that is there: one that is written
        anew could be a mixture of both.
        """
        self.file.truncate(self.told[0])
        if self.changed and not self._adds():
            self.drop()
            return False
        number = self.file.fileno()
        if self.told[3] & 0o100:
            mode = os.fstat(number).st_mode
            os.fchmod(number, mode | (mode & 0o444) >> 2)
        with contextlib.suppress(OverflowError):  # this file system cannot store the time
            os.utime(number, ns=(self.told[1], self.told[1]))
        self.file.close()
        with self.run_dir.opened(self.below) as folder:
            os.replace(self.temporary, self.name, src_dir_fd=folder, dst_dir_fd=folder)
        return True

    def _adds(self) -> bool:
        """Whether the file begins with all that is in its place; raises OSError."""
        self.file.flush()
        with self.run_dir.opened(self.below) as folder:
            try:
                there = open(opened(self.name, folder=folder), "rb")  # noqa: SIM115 (closed below)
            except FileNotFoundError:
                return True
            with there, open(opened(self.temporary, folder=folder), "rb") as here:
                return _begins_with(here, there)

    def drop(self) -> None:
        """Remove the hidden file."""
        with contextlib.suppress(OSError):
            self.file.close()
        with contextlib.suppress(OSError), self.run_dir.opened(self.below) as folder:
            os.unlink(self.temporary, dir_fd=folder)


def _begins_with(file: BinaryIO, other: BinaryIO) -> bool:
    """Whether a file begins with all of another, with the same holes; False if that would take long to find out."""
    offset, left = 0, MAX_COMPARED
    while left > 0:
        start, piece = data(other, offset, PIECE)
        found = data(file, offset, len(piece) or 1)
        if not piece:  # the rest is a hole, if there is any
            return not found[1] or found[0] >= os.fstat(other.fileno()).st_size
        if found != (start, piece):
            return False
        offset, left = start + len(piece), left - len(piece)
    return False


def reachable(run_dir: Folder, path: str) -> bool:
    """Whether a path is possible here: not too deep to be listed, not too long, and encodable in this locale."""
    try:
        return path.count("/") <= MAX_DEPTH and len(os.fsencode(run_dir.path / path)) < MAX_PATH
    except UnicodeEncodeError:
        return False


def obstacle(run_dir: Path, path: str) -> str:
    """Return what is in place of the first folder of a path that is no folder; empty if nothing is."""
    at = path.find("/")
    while at > 0:
        try:
            if not stat.S_ISDIR(os.lstat(f"{run_dir}/{path[:at]}").st_mode):
                return path[:at]
        except OSError:  # there is nothing, so far
            return ""
        at = path.find("/", at + 1)
    return ""


def clear_way(run_dir: Folder, path: str) -> None:
    """Remove a file or a link; raises OSError."""
    below, _, name = path.rpartition("/")
    with run_dir.opened(below) as folder:
        os.unlink(name, dir_fd=folder)


def link(run_dir: Folder, path: str, there: str, node: str) -> None:
    """Create a link to `there`, or replace an old link atomically; raises OSError."""
    below, _, name = path.rpartition("/")
    hidden = _hidden(name, node)
    with run_dir.opened(below, make=True) as folder:
        with contextlib.suppress(OSError):
            if os.readlink(name, dir_fd=folder) == there:
                return
        with contextlib.suppress(FileNotFoundError):
            os.unlink(hidden, dir_fd=folder)
        os.symlink(there, hidden, dir_fd=folder)
        os.replace(hidden, name, src_dir_fd=folder, dst_dir_fd=folder)


def same(path: Path, told: Facts) -> bool:
    """Whether the local file has the size and modification time of the original."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return [status.st_size, status.st_mtime_ns] == told[:2]


def _hidden(name: str, node: str) -> str:
    """Return the hidden name of a node's file; a suffix could exceed the limit of 255 bytes.

    Two nodes may send the same file at the same time.
    """
    return f".{hashlib.sha256(os.fsencode(f'{node}/{name}')).hexdigest()}.coming"
