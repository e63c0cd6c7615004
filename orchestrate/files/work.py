"""The working directory of a job's workers: a writable copy of the code folder, which is read-only in nodes.

What workers write there stays with the job. Once it has ended, `tidy` removes the copies that no worker has changed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TypeAlias

from orchestrate.errors import EngineError
from orchestrate.files.folder import ROOT, Folder, allows, allows_reading, walk_in
from orchestrate.files.paths import is_run
from orchestrate.node import trees

MAX_FILE = 64 << 20  # bytes of a file that is copied
MAX_BYTES, MAX_FILES = 512 << 20, 10_000  # bytes and files that are copied; either takes half a second
MAX_FOLDERS, MAX_DEPTH = 10_000, 60  # folders that are copied, and how deep: each is opened from the top
LINKED = "node_modules"  # a folder with many files that training does not change
VENV = "pyvenv.cfg"  # a file in every virtual environment
PIECE = 1 << 20  # bytes per read
PART = ".orchestrate-part"  # name of a file that is being copied
COMPILED = "__pycache__"
NOT_A_FOLDER = (errno.ENOTDIR, errno.ELOOP)

Facts: TypeAlias = tuple[int, int]  # size in bytes and modification time in nanoseconds of a file


@dataclass
class Copy:
    """A copy of a code folder; `run` makes it.

    It has what this process can read, whether the nodes' user can read it in the original or not. Files and folders
    beyond the limits become links to the read-only original.
    """

    code: Path  # the code folder
    hidden: Collection[str]  # paths in it that are left out
    target: Folder  # the job folder
    name: str  # of the working directory in it
    original: str  # path of the code folder in nodes
    owner: tuple[int, int] | None  # user and group ids that the files get; None for those of this process
    stopped: Callable[[], bool] = lambda: False  # whether to stop early
    copied: dict[str, Facts] = field(default_factory=dict)  # the copies, by path
    # Paths that nodes cannot read, neither as a copy; for each, what is closed: folders above it, or itself.
    unreadable: dict[str, list[str]] = field(default_factory=dict)
    files: int = 0  # copied so far
    folders: int = 0
    bytes: int = 0
    links: int = 0

    def run(self) -> None:
        """Copy what does not exist in the working directory yet; raises OSError, for example if the disk is full."""
        pending = deque([""])
        while pending and not self.stopped():
            pending += self._copy_folder(pending.popleft())

    def _copy_folder(self, path: str) -> list[str]:
        """Copy the files of a folder, or link to it if it is too large; return the folders in it.

        It is opened component by component, so that no link is followed which another program has put in its place.
        """
        found: list[str] = []
        with contextlib.ExitStack() as stack:
            entries = None
            try:
                source = stack.enter_context(ROOT.opened(f"{self.code}/{path}"))
                entries = _entries(source, MAX_FILES + 1 if path else None)
            except OSError as error:
                if not path:
                    raise EngineError(f"the code folder {self.code} cannot be read: {error.strerror}") from None
            if path and entries and is_run(entry.name for entry in entries):
                return []  # it has the files of another job, which may be large
            if entries is None or (path and not self._fits(path, entries)):
                self._link(path, needed=not (entries and _is_venv(entries)))
                return []
            self.folders += 1
            there = stack.enter_context(self._folder(path))
            for entry in sorted(entries, key=lambda entry: entry.name) if there else ():
                if self.stopped():
                    return []
                name = f"{path}/{entry.name}" if path else entry.name
                if name in self.hidden:
                    continue
                if entry.is_dir(follow_symlinks=False) and entry.name != LINKED:
                    found.append(name)
                else:
                    self._copy(entry, name, source, there)
        return found

    def _fits(self, path: str, entries: list[os.DirEntry[str]]) -> bool:
        """Whether to copy a folder: it is not too large or too deep, and no virtual environment."""
        small = len(entries) <= MAX_FILES - self.files and self.bytes < MAX_BYTES and self.folders < MAX_FOLDERS
        return small and path.count("/") < MAX_DEPTH and not _is_venv(entries)

    @contextlib.contextmanager
    def _folder(self, path: str) -> Iterator[int]:
        """Yield a descriptor of a folder in the working directory; 0 if a worker has replaced it by something else."""
        with contextlib.ExitStack() as stack:
            there = 0
            try:
                there = stack.enter_context(self.target.opened(f"{self.name}/{path}", make=True))
            except OSError as error:
                if error.errno not in NOT_A_FOLDER:
                    raise
            if there and self.owner:
                os.fchown(there, *self.owner)
            yield there

    def _copy(self, entry: os.DirEntry[str], path: str, source: int, there: int) -> None:
        """Copy a file or a symbolic link, or link to it; skip sockets, pipes and devices."""
        if entry.is_symlink():
            with contextlib.suppress(FileNotFoundError):
                self._symlink(os.readlink(entry.name, dir_fd=source), entry.name, there)
        elif entry.is_dir():
            self._symlink(f"{self.original}/{path}", entry.name, there)
        elif entry.is_file() and not self._copy_file(entry.name, path, source, there):
            self._refer(path, entry.name, there)

    def _copy_file(self, name: str, path: str, folder: int, there: int) -> bool:
        """Copy a file unless something has its name; return False if it cannot be copied."""
        try:
            source = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        except OSError:
            return False
        try:
            status = os.fstat(source)
            if status.st_size > min(MAX_FILE, MAX_BYTES - self.bytes) or self.files >= MAX_FILES:
                return False
            if existing := _status(name, there):
                if _is_copy(existing, facts(status)):  # by an earlier process
                    self.copied[path] = facts(status)
                return True
            trees.remove(there, PART)  # of an earlier process, or a worker's
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            copy = os.open(PART, flags, 0o600, dir_fd=there)
            try:
                left = status.st_size  # it may be growing
                while piece := memoryview(os.read(source, min(left, PIECE))):
                    left -= len(piece)
                    while piece:
                        piece = piece[os.write(copy, piece) :]
                if self.owner:
                    os.fchown(copy, *self.owner)
                os.fchmod(copy, stat.S_IMODE(status.st_mode) & 0o777 | stat.S_IRUSR)
                os.utime(copy, ns=(status.st_atime_ns, status.st_mtime_ns))
                self.copied[path] = facts(os.fstat(copy))
            finally:
                os.close(copy)
            os.rename(PART, name, src_dir_fd=there, dst_dir_fd=there)
        finally:
            os.close(source)
        self.files += 1
        self.bytes += status.st_size
        return True

    def _link(self, path: str, needed: bool) -> None:
        """Link to the original of a folder whose parent has been copied; not of the code folder itself."""
        parent, _, name = path.rpartition("/")
        with self._folder(parent) as there:
            if there and name and needed:
                self._refer(path, name, there)
            elif there and name:
                self._symlink(f"{self.original}/{path}", name, there)

    def _refer(self, path: str, name: str, there: int) -> None:
        """Link to an original that workers may need; note whether they cannot read it."""
        self._symlink(f"{self.original}/{path}", name, there)
        if closed := self._closed(self.code / path):
            self.unreadable[path] = [os.path.relpath(each, self.code) for each in closed]

    def _closed(self, path: Path) -> list[Path]:
        """Return what keeps nodes from reading an original: folders above it, or itself."""
        if self.owner is None:
            return [] if os.access(path, os.R_OK) or not os.path.lexists(path) else [path]
        above = [folder for folder in reversed(path.parents) if folder.is_relative_to(self.code)]
        with contextlib.suppress(FileNotFoundError):  # it has been removed meanwhile
            closed = [folder for folder in above if not allows(folder.lstat(), *self.owner, stat.S_IXOTH)]
            return closed + [path] * (not allows_reading(path.lstat(), *self.owner))
        return []

    def _symlink(self, target: str, name: str, there: int) -> None:
        with contextlib.suppress(FileExistsError):
            os.symlink(target, name, dir_fd=there)
            self.links += target.startswith(f"{self.original}/")
            if self.owner:
                os.chown(name, *self.owner, dir_fd=there, follow_symlinks=False)


def _entries(folder: int, most: int | None) -> list[os.DirEntry[str]]:
    """List a folder, up to a limit; raises OSError."""
    with os.scandir(folder) as found:
        return [*islice(found, most)]


def _is_venv(entries: list[os.DirEntry[str]]) -> bool:
    return any(entry.name == VENV for entry in entries)


def facts(status: os.stat_result) -> Facts:
    """Return what changes when a file changes."""
    return status.st_size, status.st_mtime_ns


def _status(name: str, folder: int) -> os.stat_result | None:
    """Return the status of a name in a folder, given by its descriptor, or None; does not follow a link."""
    with contextlib.suppress(FileNotFoundError):
        return os.stat(name, dir_fd=folder, follow_symlinks=False)
    return None


def _is_copy(status: os.stat_result, original: Facts | None) -> bool:
    return stat.S_ISREG(status.st_mode) and facts(status) == original


def tidy(
    code: Path, folder: Folder, work: str, original: str, most: int, copied: Mapping[str, Facts]
) -> tuple[list[str], bool]:
    """Remove what no worker has changed from a working directory that nodes cannot reach anymore.

    Return the paths of all other files, at most `most`, and whether these are all. `work` is its name in the job
    folder, which nodes may have replaced, `original` is the path of the code folder in nodes, and `copied` are the
    files as they were copied: the code may have changed since. Raises OSError if something cannot be removed.
    """
    written: list[str] = []
    entered: list[str] = []  # the folders around the current one
    complete = True

    def leave(root: str) -> None:
        """Remove the folders that were entered and are not around `root`, if they are copies and empty."""
        while entered and not f"{root}/".startswith(f"{entered[-1]}/"):
            path = entered.pop()
            if os.path.basename(path) == COMPILED or (code / path).is_dir():
                with contextlib.suppress(OSError), folder.opened(f"{work}/{os.path.dirname(path)}") as above:
                    os.rmdir(os.path.basename(path), dir_fd=above)

    with folder.opened() as parent:
        for root, _, names, descriptor in walk_in(work, parent):
            leave(here := os.path.normpath(root))
            if here not in (".", *entered[-1:]):
                entered.append(here)
            for name in names:
                path = os.path.normpath(f"{root}/{name}")
                unchanged = _unchanged(name, descriptor, code / path, f"{original}/{path}", copied.get(path))
                if COMPILED in path.split("/") or unchanged:
                    os.unlink(name, dir_fd=descriptor)
                elif len(written) < most:
                    written.append(path)
                else:
                    complete = False
        leave("")
    return sorted(written), complete


def _unchanged(name: str, folder: int, source: Path, link: str, copied: Facts | None) -> bool:
    """Whether a file is as `Copy` has made it: a copy of `source`, or the symbolic link `link` to it."""
    with contextlib.suppress(OSError):
        copy = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if stat.S_ISLNK(copy.st_mode):
            target = os.readlink(name, dir_fd=folder)
            return target == link or (source.is_symlink() and target == os.readlink(source))
        if _is_copy(copy, copied):
            return True
        original = source.lstat()
        return stat.S_ISREG(original.st_mode) and _is_copy(copy, facts(original))
    return False
