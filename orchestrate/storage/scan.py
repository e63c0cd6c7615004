"""The files of a folder that nodes write, as they are at one moment."""

from __future__ import annotations

import errno
import os
import stat
import sys

from orchestrate.dataclass import dataclass, field
from orchestrate.errors import StorageRefused
from orchestrate.files.folder import MAX_DEPTH, Folder
from orchestrate.node.messages.checks import shown
from orchestrate.node.trees import hidden

MAX_FILES = 100_000  # entries of a tree: its manifest is then about 40 MB
MAX_NAMES = 32 << 20  # bytes that the paths of a tree take in memory
MAX_PATH = 4000  # bytes of a path, so that it can be fetched into another folder: Linux opens up to 4,095
MAX_SIZE = 256 << 30  # bytes of a file: its parts, of which several are in memory, take up to 30 MB
MAX_TIME = (1 << 63) - 1  # nanoseconds since 1970 that a manifest can have, until 2262: ext4 has dates until 2446
HOLLOW = 1 << 30  # bytes that sparse files may have, one or all of a tree: a job can make any, in no time
SPARSE = 8  # times the size on the disk, which may compress files
GONE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EINVAL)  # removed, or replaced by a link or a special file


@dataclass(frozen=True)
class Facts:
    """What changes when a file changes: size in bytes, modification time in nanoseconds, inode, time of change."""

    size: int
    mtime_ns: int
    inode: int
    ctime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Facts:
        """The facts of a file's status."""
        when = max(-MAX_TIME, min(MAX_TIME, status.st_mtime_ns))
        return cls(status.st_size, when, status.st_ino, status.st_ctime_ns)


@dataclass
class Scan:
    """The regular files of a tree by path, and why others are skipped; temporary (hidden) files are left out."""

    files: dict[str, Facts] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    sparse: int = 0  # bytes of sparse files among them, with their holes


def scan(folder: Folder, below: str) -> Scan:
    """Scan a folder below; empty if it does not exist. Follows no links; paths are relative to `below`.

    Raises OSError for a folder that cannot be read, StorageRefused for too many files: a part must not look complete.
    """
    found, pending, left, names = Scan(), [""], MAX_FILES, 0
    while pending:
        here = pending.pop()
        try:
            with folder.opened(f"{below}/{here}") as descriptor, os.scandir(descriptor) as entries:
                for entry in entries:
                    left -= 1
                    if left < 0:
                        raise StorageRefused(f"{below} has more than {MAX_FILES:,} files, which are too many to copy")
                    if hidden(entry.name):
                        continue
                    path = here + entry.name
                    names += sys.getsizeof(path)  # four times the number of characters, if one of them is an emoji
                    if names > MAX_NAMES:
                        raise StorageRefused(f"{below} has file names of more than {MAX_NAMES >> 20} MiB")
                    _take(entry, path, found, pending)
        except OSError as error:
            if error.errno not in GONE:
                raise OSError(error.errno, error.strerror, f"{below}/{here}") from error
    return found


def is_sparse(status: os.stat_result, others: int = 0) -> bool:
    """Whether a file has much less content than its size, and is large, with `others` bytes of such files."""
    return status.st_size > SPARSE * 512 * status.st_blocks and status.st_size + others > HOLLOW


def named(path: str) -> str:
    """A path of a job for display, not shortened: it is masked later."""
    return shown(path, MAX_PATH)


def _take(entry: os.DirEntry[str], path: str, found: Scan, pending: list[str]) -> None:
    try:
        length = len(path.encode())
        status = entry.stat(follow_symlinks=False)
    except UnicodeEncodeError:
        found.skipped[named(path)] = "its name is not UTF-8"
        return
    except FileNotFoundError:
        return
    if stat.S_ISDIR(status.st_mode):
        if path.count("/") + 1 >= MAX_DEPTH:
            found.skipped[named(path)] = f"more than {MAX_DEPTH} nested folders"
        else:
            pending.append(f"{path}/")
    elif not stat.S_ISREG(status.st_mode):
        found.skipped[named(path)] = "not a regular file"
    elif length > MAX_PATH:
        found.skipped[named(path)] = f"its path is longer than {MAX_PATH:,} bytes"
    elif status.st_size > MAX_SIZE:
        found.skipped[named(path)] = f"larger than {MAX_SIZE >> 30} GiB"
    elif is_sparse(status, found.sparse):
        found.skipped[named(path)] = "a sparse file, which has much less content than its size"
    else:
        found.sparse += status.st_size * (status.st_size > SPARSE * 512 * status.st_blocks)
        found.files[path] = Facts.of(status)
