"""A folder that nodes write, and so can be anything below: links, pipes, deep trees, names that are no text.

Every path here is relative to the folder and is walked by directory descriptors, so that no link is ever followed,
whenever it appears; and what is read is bounded.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from orchestrate.node.trees import FOLDER, clear, opened, set_mode

MAX_DEPTH = 32  # folders below one another in which anything is looked for
MAX_FILE = 64 << 20  # bytes of a file of ours
MAX_ENTRIES = 10_000  # entries that one look takes in
_SET_IDS = stat.S_ISUID | stat.S_ISGID


@dataclass(frozen=True)
class Folder:
    """The folder `name` of `parent`; nodes can write, or replace, the former but not the latter."""

    parent: Path
    name: str

    @property
    def path(self) -> Path:
        """Where it is; for mounts and messages, not to open anything by."""
        return self.parent / self.name

    @contextlib.contextmanager
    def opened(self, below: str = "", make: bool = False) -> Iterator[int]:
        """A descriptor of the folder, or of one below it; raises OSError for a link on the way.

        `make`: folders that are missing are made.
        """
        descriptor = os.open(self.parent, FOLDER & ~os.O_NOFOLLOW)
        try:
            for name in (self.name, *filter(None, below.split("/"))):
                if make:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(name, dir_fd=descriptor)
                inner = os.open(name, FOLDER, dir_fd=descriptor)
                os.close(descriptor)
                descriptor = inner
            yield descriptor
        finally:
            os.close(descriptor)

    def open(self, path: str) -> BinaryIO:
        """Open a regular file to read; raises OSError for anything else."""
        below, _, name = path.rpartition("/")
        with self.opened(below) as folder:
            return regular(name, folder)

    def write(self, name: str, text: str) -> None:
        """Write a file whole or not at all, in the place of whatever has its name."""
        with self.opened() as folder:
            try:
                write_whole(name, text, folder, mode=0o644)
            except IsADirectoryError:
                os.rename(name, f".{name}.{secrets.token_hex(4)}", src_dir_fd=folder, dst_dir_fd=folder)
                write_whole(name, text, folder, mode=0o644)

    def make(self, *names: str, owner: tuple[int, int] | None = None) -> None:
        """Make the folder, and folders in it, for the user and group ids `owner` where they are given.

        Raises FileExistsError where anything of its name exists, OSError.
        """
        os.mkdir(self.path, 0o755)
        for below in ("", *names):
            with self.opened() as folder:
                if below:
                    os.mkdir(below, 0o755, dir_fd=folder)
            if owner:
                with self.opened(below) as made:
                    os.chown(made, *owner)

    def entries(self, below: str = "") -> list[tuple[str, os.stat_result]]:
        """Names and facts of what is in the folder or in one below it, links as such; nothing where it is no folder."""
        found = []
        with contextlib.suppress(OSError), self.opened(below) as folder, os.scandir(folder) as entries:
            for entry in islice(entries, MAX_ENTRIES):
                with contextlib.suppress(OSError):
                    found.append((entry.name, entry.stat(follow_symlinks=False)))
        return found

    def files(self, below: str) -> tuple[list[str], bool]:
        """The regular files in a folder below, and in all folders of it, by their paths; none that is hidden.

        And whether these are all: there can be more entries, of any kind, than one look takes in.
        """
        found: list[str] = []
        waiting, room = [below], MAX_ENTRIES
        while waiting:
            here = waiting.pop()
            with contextlib.suppress(OSError), self.opened(here) as folder, os.scandir(folder) as entries:
                for entry in entries:
                    if not room:
                        return sorted(found), False
                    room -= 1
                    path = f"{here}/{entry.name}"
                    if entry.name.startswith("."):  # on its way to be a file
                        continue
                    if entry.is_file(follow_symlinks=False):
                        found.append(path)
                    elif entry.is_dir(follow_symlinks=False) and path.count("/") < MAX_DEPTH:
                        waiting.append(path)
        return sorted(found), True


def regular(path: str | Path, folder: int | None = None) -> BinaryIO:
    """Open a regular file to read, in the folder of a descriptor; raises OSError for a link, a pipe or a device."""
    return os.fdopen(opened(str(path), folder=folder), "rb")


def content(path: str | Path, folder: int | None = None) -> str:
    """The text of a regular file, in the folder of a descriptor; raises OSError for anything else, or for a large one.

    ValueError is raised where it is no text.
    """
    with regular(path, folder) as file:
        read = file.read(MAX_FILE + 1)
    if len(read) > MAX_FILE:
        raise OSError(errno.EFBIG, f"larger than {MAX_FILE >> 20} MiB", str(path))
    return read.decode()


def write_whole(path: str | Path, text: str, folder: int | None = None, mode: int = 0o600) -> None:
    """Write a file whole or not at all, through no link that may be in its place."""
    name = Path(path)
    temporary = name.with_name(f".{name.name}.{secrets.token_hex(4)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(temporary, flags, mode, dir_fd=folder)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError:
        os.unlink(temporary, dir_fd=folder)
        raise


def harmless(path: Path) -> None:
    """Take set-user-id and set-group-id bits away from all files of a folder; raises OSError where one keeps them."""
    kept: OSError | None = None
    for _, _, names, folder in _walk(path):
        for name in names:
            try:
                status = os.stat(name, dir_fd=folder, follow_symlinks=False)
                if stat.S_ISREG(status.st_mode) and status.st_mode & _SET_IDS:
                    set_mode(name, folder, stat.S_IMODE(status.st_mode) & ~_SET_IDS)
            except FileNotFoundError:
                continue
            except OSError as error:
                kept = error
    if kept:
        raise kept


def remove(path: Path) -> None:
    """Remove a folder with all that is in it, however deep; raises OSError where that does not let us."""
    if left := clear(str(path)):
        raise OSError(errno.ENOTEMPTY, "not all of it can be removed", str(path / left[0]))
    path.rmdir()


def renew(path: Path, mode: int) -> None:
    """Give a folder of nodes the mode of a new one, and take away extended attributes, such as access control lists.

    What one job has set there would count for the files of the next one. Raises OSError.
    """
    with Folder(path.parent, path.name).opened() as folder:
        if sys.platform == "linux":
            for name in os.listxattr(folder):
                with contextlib.suppress(OSError):  # of the system itself, such as security.selinux
                    os.removexattr(folder, name)
        os.fchmod(folder, mode)


def _walk(path: Path) -> Iterator[tuple[str, list[str], list[str], int]]:
    """As os.fwalk; folders that are too deep, or closed, are first moved to the top, or opened for their owner.

    A walk needs a descriptor and a stack frame for each level.
    """
    waiting, moved, unique = ["."], 0, f".{secrets.token_hex(8)}"  # which no job can have taken
    parent = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _let_in(path.name, parent)
        top = os.open(path.name, FOLDER, dir_fd=parent)
    finally:
        os.close(parent)
    try:
        while waiting:
            for root, folders, names, folder in os.fwalk(waiting.pop(), dir_fd=top, follow_symlinks=False):
                for name in folders:
                    _let_in(name, folder)
                if root.count("/") >= MAX_DEPTH:
                    for name in [*folders]:
                        moved += 1
                        with contextlib.suppress(OSError):
                            os.rename(name, f"{unique}-{moved}", src_dir_fd=folder, dst_dir_fd=top)
                            waiting.append(f"{unique}-{moved}")
                            folders.remove(name)
                yield root, folders, names, folder
    finally:
        os.close(top)


def _let_in(name: str, folder: int) -> None:
    """Give the owner of a folder, whom its mode may keep out, the right to read, write and enter it."""
    with contextlib.suppress(OSError):
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if stat.S_ISDIR(status.st_mode) and status.st_mode & 0o700 != 0o700:
            set_mode(name, folder, stat.S_IMODE(status.st_mode) | 0o700)
