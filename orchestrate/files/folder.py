"""Safe access to a folder that nodes write: it may contain links, pipes, deep trees and names that are not text.

Paths are relative to the folder and are opened component by component with directory descriptors, so links are never
followed, whenever they appear; reads are bounded.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from orchestrate.dataclass import dataclass
from orchestrate.node.trees import FOLDER, allow_moves, clear, opened, set_mode

MAX_DEPTH = 32  # nested folders that are searched
MAX_FILE = 64 << 20  # bytes of a file to read
MAX_ENTRIES = 10_000  # entries per listing
LINKS = 40  # links that Linux follows
BATCH = 1000  # entries of a folder that are in memory
# To enter a folder, and not list it, which may not be allowed: as with other users' folders in /home.
ENTER = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_SET_IDS = stat.S_ISUID | stat.S_ISGID


@dataclass(frozen=True)
class Folder:
    """The folder `name` of `parent`, or one below it; nodes can write or replace the former, but not the latter.

    A project can replace both by a link, with `git pull` for example: nothing is opened in a parent that has not the
    `inode`, if that is known.
    """

    parent: Path
    name: str
    inode: int = 0

    @property
    def path(self) -> Path:
        """The path, for mounts and messages, not for opening files."""
        return self.parent / self.name

    @contextlib.contextmanager
    def opened(self, below: str = "", make: bool = False, mode: int = FOLDER) -> Iterator[int]:
        """Yield a descriptor of the folder, or of one below it; raises OSError for a link on the way.

        `make` creates missing folders; `mode` is how the last one is opened.
        """
        names = [*self.name.split("/"), *filter(None, below.split("/"))]
        descriptor = os.open(self.parent, ENTER & ~os.O_NOFOLLOW)
        try:
            if self.inode and os.fstat(descriptor).st_ino != self.inode:
                raise OSError(errno.ESTALE, "it was replaced by another one", str(self.parent))
            for left in range(len(names), 0, -1):
                if make:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(names[-left], dir_fd=descriptor)
                inner = os.open(names[-left], ENTER if left > 1 else mode, dir_fd=descriptor)
                os.close(descriptor)
                descriptor = inner
            yield descriptor
        finally:
            os.close(descriptor)

    def open(self, path: str) -> BinaryIO:
        """Open a regular file for reading; raises OSError for anything else."""
        below, _, name = path.rpartition("/")
        with self.opened(below, mode=ENTER) as folder:
            return regular(name, folder)

    def size(self, path: str) -> int:
        """Return the size of a regular file; 0 for anything else."""
        with contextlib.suppress(OSError), self.open(path) as file:
            return os.fstat(file.fileno()).st_size
        return 0

    def write(self, name: str, text: str) -> None:
        """Write a file atomically, replacing whatever has its name."""
        with self.opened() as folder:
            write_whole(name, text, folder, mode=0o644)

    def make(self, *names: str, owner: tuple[int, int] | None = None) -> None:
        """Create the folder, and folders in it, owned by the user and group ids `owner` if given.

        Raises FileExistsError if the name exists, OSError.
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
        """List the folder or one below it: names and status, without following links; empty if it is no folder."""
        found = []
        with contextlib.suppress(OSError), self.opened(below) as folder, os.scandir(folder) as entries:
            for entry in islice(entries, MAX_ENTRIES):
                with contextlib.suppress(OSError):
                    found.append((entry.name, entry.stat(follow_symlinks=False)))
        return found

    def files(self, below: str) -> tuple[list[str], bool]:
        """Return the paths of all regular files in a folder below, recursively, except hidden ones.

        Also return whether the list is complete: the number of entries that are read is limited.
        """
        found: list[str] = []
        pending, left = [below], MAX_ENTRIES
        while pending:
            here = pending.pop()
            with contextlib.suppress(OSError), self.opened(here) as folder, os.scandir(folder) as entries:
                for entry in entries:
                    if not left:
                        return sorted(found), False
                    left -= 1
                    path = f"{here}/{entry.name}"
                    if entry.name.startswith("."):  # temporary file
                        continue
                    if entry.is_file(follow_symlinks=False):
                        found.append(path)
                    elif entry.is_dir(follow_symlinks=False) and path.count("/") < MAX_DEPTH:
                        pending.append(path)
        return sorted(found), True


ROOT = Folder(Path("/"), ".")  # to open a real path, so that no link is followed that a job has put there meanwhile


def visited(path: Path) -> Iterator[Path]:
    """Yield the files and folders on the way to a path, from the root down, following links; the last is its target.

    Raises OSError for a loop of links.
    """
    here, names, links = Path("/"), [*reversed((Path.cwd() / path).parts)], 0
    while names:
        here = Path(os.path.normpath(here / names.pop()))
        yield here
        if here.is_symlink():
            links += 1
            if links > LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
            here, names = here.parent, names + [*reversed(Path(os.readlink(here)).parts)]


def unlinked(path: Path) -> os.stat_result:
    """Return the status of a file or folder, given by its real path; raises OSError if a link is on the way."""
    with ROOT.opened(str(path.parent), mode=ENTER) as folder:
        return os.stat(path.name, dir_fd=folder, follow_symlinks=False)


def regular(path: str | Path, folder: int | None = None) -> BinaryIO:
    """Open a regular file for reading, relative to a descriptor; raises OSError for a link, a pipe or a device."""
    return os.fdopen(opened(str(path), folder=folder), "rb")


def replacing_links(path: str, flags: int) -> int:
    """An opener for `open`: of a file to write, for this account only; a link in its place is removed, not followed."""
    try:
        return os.open(path, flags | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
    os.unlink(path)
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def content(path: str | Path, folder: int | None = None) -> str:
    """Return the text of a regular file, relative to a descriptor; raises OSError for anything else, or a large file.

    Raises ValueError if it is not text.
    """
    with regular(path, folder) as file:
        size = min(os.fstat(file.fileno()).st_size, MAX_FILE)
        read = file.read(size + 1)  # Python takes memory for all that it is asked for
        if len(read) > size:  # it has grown
            read += file.read(MAX_FILE + 1 - len(read))
    most = MAX_FILE if read.isascii() else MAX_FILE // 4  # one emoji, and Python takes four bytes for each character
    if len(read) > most:
        raise OSError(errno.EFBIG, f"larger than {most >> 20} MiB", str(path))
    return read.decode()


def gone(path: str | Path) -> bool:
    """Return whether nothing has this path; False if that is not known, since its disk or server has an error."""
    try:
        os.lstat(path)
    except FileNotFoundError:
        return True
    except OSError:
        pass
    return False


def write_whole(path: str | Path, text: str | bytes, folder: int | None = None, mode: int = 0o600) -> None:
    """Write a file atomically; a link in its place is replaced, not followed, and a folder is moved aside."""
    name = Path(path)
    temporary = name.with_name(f".{name.name}.{secrets.token_hex(4)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(temporary, flags, mode, dir_fd=folder)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, mode)  # whatever the umask
            file.write(text.encode() if isinstance(text, str) else text)
        try:
            os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
        except IsADirectoryError:
            aside = name.with_name(f".{name.name}.{secrets.token_hex(4)}")
            os.rename(name, aside, src_dir_fd=folder, dst_dir_fd=folder)
            os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        os.unlink(temporary, dir_fd=folder)
        raise


def allows(status: os.stat_result, user: int, group: int, rights: int) -> bool:
    """Whether a file's mode grants a user all `rights`, given as its mode bits for others; root has them all."""
    shift = 6 if status.st_uid == user else 3 if status.st_gid == group else 0
    return user == 0 or (status.st_mode >> shift) & rights == rights


def allows_reading(status: os.stat_result, user: int, group: int) -> bool:
    """Whether a mode lets a user read the file, or list and enter the folder."""
    return allows(status, user, group, 5 if stat.S_ISDIR(status.st_mode) else 4)


def harmless(path: Path) -> None:
    """Remove set-user-ID and set-group-ID bits from all files of a folder; raises OSError if a file keeps them."""
    failure: OSError | None = None
    for _, _, names, folder in walk(path):
        for name in names:
            try:
                status = os.stat(name, dir_fd=folder, follow_symlinks=False)
                if stat.S_ISREG(status.st_mode) and status.st_mode & _SET_IDS:
                    set_mode(name, folder, stat.S_IMODE(status.st_mode) & ~_SET_IDS)
            except FileNotFoundError:
                continue
            except OSError as error:
                failure = error
    if failure:
        raise failure


def remove(path: Path) -> None:
    """Remove a folder and its content, however deep; raises OSError if something cannot be removed."""
    if left := clear(str(path)):
        raise OSError(errno.ENOTEMPTY, "could not remove all of it", str(path / left[0]))
    path.rmdir()


def renew(path: Path, mode: int) -> None:
    """Reset the mode of a folder of nodes, and remove extended attributes such as access control lists.

    Otherwise, what one job sets would apply to files of the next one. Raises OSError.
    """
    grant_access(str(path))
    with Folder(path.parent, path.name).opened() as folder:
        if sys.platform == "linux":
            for name in os.listxattr(folder):
                with contextlib.suppress(OSError):  # system attributes such as security.selinux
                    os.removexattr(folder, name)
        os.fchmod(folder, mode)


def walk(path: Path) -> Iterator[tuple[str, list[str], list[str], int]]:
    """Yield the folders below a path: its path in it, some folders and others of its entries, and its descriptor.

    Unlike os.fwalk, a large folder is yielded several times, folders that are too deep are first moved to the top, and
    others are opened for their owner: a job may have created any number of files, at any depth.
    """
    parent = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield from walk_in(path.name, parent)
    finally:
        os.close(parent)


def walk_in(name: str, parent: int) -> Iterator[tuple[str, list[str], list[str], int]]:
    """Like `walk`, for a folder in the one with the descriptor `parent`."""
    unique, moved, done = f".{secrets.token_hex(8)}", 0, 0  # a name that no job can have taken

    def below(root: str, folder: int, depth: int) -> Iterator[tuple[str, list[str], list[str], int]]:
        nonlocal moved
        with os.scandir(folder) as entries:
            full = True
            while full:
                batch = [*islice(entries, BATCH)]
                full = len(batch) == BATCH
                folders = [each.name for each in batch if each.is_dir(follow_symlinks=False)]
                names = [each.name for each in batch if not each.is_dir(follow_symlinks=False)]
                for inner in [*folders]:
                    grant_access(inner, folder)
                    if inner.startswith(unique):  # walked below
                        folders.remove(inner)
                    elif depth == MAX_DEPTH:
                        folders.remove(inner)
                        with contextlib.suppress(OSError):
                            os.rename(inner, f"{unique}-{moved}", src_dir_fd=folder, dst_dir_fd=top)
                            moved += 1
                yield root, folders, names, folder
                for inner in folders:
                    yield from enter(inner, folder, f"{root}/{inner}", depth + 1)

    def enter(name: str, folder: int, root: str, depth: int) -> Iterator[tuple[str, list[str], list[str], int]]:
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):  # it was removed, or cannot be read
            descriptor = os.open(name, FOLDER, dir_fd=folder)
            stack.callback(os.close, descriptor)
            yield from below(root, descriptor, depth)

    grant_access(name, parent)
    top = os.open(name, FOLDER, dir_fd=parent)
    allow_moves(top)
    try:
        yield from below(".", top, 0)
        while done < moved:
            yield from enter(f"{unique}-{done}", top, f"./{unique}-{done}", 1)
            done += 1
    finally:
        os.close(top)


def grant_access(name: str, folder: int | None = None) -> None:
    """Give the owner of a folder the right to read, write and enter it, if that is possible."""
    with contextlib.suppress(OSError):
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if stat.S_ISDIR(status.st_mode) and status.st_mode & 0o700 != 0o700:
            set_mode(name, folder, stat.S_IMODE(status.st_mode) | 0o700)
