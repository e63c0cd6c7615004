"""Folders that workers write to, which may hold anything: no link in them is followed, no FIFO or device blocks.

And what must be mounted in a node before it starts a worker, since a job may have replaced it.
"""

from __future__ import annotations

import binascii
import contextlib
import errno
import fcntl
import json
import os
import re
import stat
import struct
import sys
import zlib
from collections.abc import Collection, Iterator
from itertools import islice
from typing import BinaryIO

from orchestrate.node.messages.checks import Refused, shown

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
GET_PROJECT, SET_PROJECT = 0x801C581F, 0x401C5820  # FS_IOC_FSGETXATTR and FS_IOC_FSSETXATTR of linux/fs.h
PROJECT_INHERIT = 0x200  # FS_XFLAG_PROJINHERIT
_PROJECT = struct.Struct("5I8s")  # struct fsxattr: the first number has the flags
BATCH = 1000  # names of a folder that are in memory: a job can create millions


def hidden(name: str) -> bool:
    """Whether a file is hidden, and so never transferred; `.metadata` belongs to torch's distributed checkpoints."""
    return name.startswith(".") and name != ".metadata"


def identity(status: os.stat_result) -> str:
    """What no two files or folders of this machine share while both exist: device and inode."""
    return f"{status.st_dev}:{status.st_ino}"


def opened(path: str, flags: int = os.O_RDONLY, folder: int | None = None) -> int:
    """Open a regular file, relative to a folder's descriptor if there is one; raises OSError for anything else.

    Links are not followed, and a FIFO or a device does not block.
    """
    if not flags & os.O_CREAT and not stat.S_ISREG(os.stat(path, dir_fd=folder, follow_symlinks=False).st_mode):
        raise OSError(errno.EINVAL, "not a regular file", path)  # opening a device can have effects
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", path)
    return descriptor


def data(file: BinaryIO, offset: int, most: int) -> tuple[int, bytes]:
    """Read the next data of a file from an offset on, skipping a hole; return its offset and at most `most` bytes.

    There are no bytes at the end of the file, or if the rest is a hole.
    """
    if hasattr(os, "SEEK_DATA"):
        try:
            offset = os.lseek(file.fileno(), offset, os.SEEK_DATA)
            most = min(most, os.lseek(file.fileno(), offset, os.SEEK_HOLE) - offset)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return offset, b""
    return offset, os.pread(file.fileno(), most, offset)


def replace(path: str, text: str, mode: int = 0o644, folder: int | None = None) -> None:
    """Replace whatever is at `path`, relative to a folder's descriptor if there is one, by a file; raises OSError."""
    fresh = os.path.join(os.path.dirname(path), f".{os.urandom(8).hex()}")
    try:
        with open(opened(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, folder), "wb") as file:
            os.fchmod(file.fileno(), mode)
            file.write(text.encode(errors="surrogateescape"))
        os.replace(fresh, path, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(fresh, dir_fd=folder)
        raise


def walk(folder: str) -> Iterator[tuple[str, os.stat_result]]:
    """Yield regular files and links that are not hidden, by their path in the folder, up to the maximum path length."""
    below = [""]
    while below:
        here = below.pop()
        try:
            entries = os.scandir(f"{folder}/{here}")
        except OSError:  # it has gone, or is not readable
            continue
        with entries:
            for entry in entries:
                if hidden(entry.name):
                    continue
                with contextlib.suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISDIR(status.st_mode):
                        below.append(f"{here}{entry.name}/")
                    elif stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode):
                        yield here + entry.name, status


def clear(folder: str, keep: Collection[str] = ()) -> list[str]:
    """Remove everything in a folder except the names `keep`; return the paths that cannot be removed.

    Raises OSError if it is not a folder, or cannot be read.
    """
    top = _folder(folder, None)
    allow_moves(top)
    kept, left = {*keep}, list[str]()
    try:
        while True:
            with os.scandir(top) as entries:
                names = [*islice((entry.name for entry in entries if entry.name not in kept), BATCH)]
            for name in names:
                if found := remove(top, name):
                    kept.add(name)
                    left += found
            if len(names) < BATCH:
                return left
    finally:
        os.close(top)


def remove(top: int, name: str) -> list[str]:
    """Remove a file or a folder in the folder `top`; return the paths that cannot be removed.

    Folders in it are moved to the top first, so neither the stack nor a path grows with their depth.
    """
    left, done, moved = list[str](), -1, 0
    unique = f".{os.urandom(8).hex()}"
    while done < moved:
        done += 1
        name = f"{unique}-{done}" if done else name
        try:
            if not stat.S_ISDIR(os.lstat(name, dir_fd=top).st_mode):
                os.unlink(name, dir_fd=top)
                continue
            here = _folder(name, top)
        except OSError:
            left.append(name)
            continue
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, here)
            for entry in stack.enter_context(os.scandir(here)):
                try:
                    if entry.is_dir(follow_symlinks=False):
                        os.close(_folder(entry.name, here))  # a folder that is not writable could not be moved
                        os.rename(entry.name, f"{unique}-{moved + 1}", src_dir_fd=here, dst_dir_fd=top)
                        moved += 1
                    else:
                        os.unlink(entry.name, dir_fd=here)
                except OSError:
                    left.append(f"{name}/{entry.name}")
        with contextlib.suppress(OSError):  # something in it is left
            os.rmdir(name, dir_fd=top)
    return left


def allow_moves(folder: int) -> None:
    """Let folders be moved into this one: the kernel refuses it after a job has made its files inherit a project."""
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError):  # not every file system has projects
        flags, *rest = _PROJECT.unpack(fcntl.ioctl(folder, GET_PROJECT, bytes(_PROJECT.size)))
        if flags & PROJECT_INHERIT:
            fcntl.ioctl(folder, SET_PROJECT, _PROJECT.pack(flags & ~PROJECT_INHERIT, *rest))


def set_mode(name: str, folder: int | None, mode: int) -> None:
    """Like chmod without following a link, which Linux supports only through a descriptor; raises OSError."""
    if sys.platform != "linux":
        return os.chmod(name, mode, dir_fd=folder, follow_symlinks=False)
    descriptor = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    try:
        if not stat.S_ISLNK(os.fstat(descriptor).st_mode):
            os.chmod(f"/proc/self/fd/{descriptor}", mode)
    finally:
        os.close(descriptor)


def _folder(name: str, folder: int | None) -> int:
    """Open a folder after adding all permissions of its owner."""
    try:
        descriptor = os.open(name, FOLDER, dir_fd=folder)
    except PermissionError:
        set_mode(name, folder, 0o700)
        descriptor = os.open(name, FOLDER, dir_fd=folder)
    with contextlib.suppress(OSError):  # it may belong to another user
        if os.fstat(descriptor).st_mode & 0o300 != 0o300:
            os.fchmod(descriptor, 0o700)
    return descriptor


def check(folders: dict[str, str]) -> None:
    """Raise Refused for a folder or file with another identity than expected."""
    for path, expected in folders.items():
        try:
            found = identity(os.stat(path))
        except OSError as error:
            raise Refused(f"start: folders: {shown(path)} cannot be read: {error.strerror}") from None
        if found != expected:
            raise Refused(f"start: folders: {shown(path)} is not the folder that the orchestrator sees")


def missing(masks: str) -> str:
    """Return the first path of `packed` ones at which nothing is mounted, since a link led its mount elsewhere.

    It is empty if each has a mount of its own, or has gone together with what it hid. All are looked up in one list of
    mounts: a job can rename folders.
    """
    if not masks:
        return ""
    paths = [path.encode() for path in json.loads(zlib.decompress(binascii.a2b_base64(masks)))]
    known, mounts, elsewhere = {*paths}, dict[bytes, bytes](), False
    with open("/proc/self/mountinfo", "rb") as file:
        for line in file:
            number, _, _, root, where, *_ = line.split(b" ")
            path = re.sub(rb"\\([0-7]{3})", lambda code: bytes([int(code[1], 8)]), where)
            mounts[path] = number
            hides = root == b"/null" or (b" - tmpfs " in line and b"size=4k" in line)  # as a mask of ours
            elsewhere |= hides and path not in known and not path.startswith((b"/proc/", b"/sys/", b"/dev/"))
    there = [path for path in paths if path in mounts or elsewhere or os.path.lexists(path)]
    owners = {mounts.get(path, b""): path for path in there}  # of each mount, the last path
    return next((os.fsdecode(path) for path in there if path not in mounts or owners[mounts[path]] != path), "")


def packed(paths: list[str]) -> str:
    """Return paths as a short text for a variable."""
    return binascii.b2a_base64(zlib.compress(json.dumps(paths).encode()), newline=False).decode()
