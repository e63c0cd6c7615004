"""What is mounted where on this machine, by `/proc/self/mountinfo` (proc(5)); nothing on other systems."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FILE = Path("/proc/self/mountinfo")
KERNELS = {
    *("proc", "sysfs", "devpts", "devtmpfs", "cgroup", "cgroup2", "mqueue", "hugetlbfs", "nsfs", "bpf"),
    *("binfmt_misc", "configfs", "debugfs", "efivarfs", "fusectl", "pstore", "rpc_pipefs", "securityfs", "tracefs"),
}


@dataclass(frozen=True)
class Mount:
    """The folder `root` of a file system, which can be seen at `point`."""

    device: bytes  # major:minor of the file system
    root: Path
    point: Path
    kind: str  # the type of the file system


def mounts() -> list[Mount]:
    """All mounts, in the order in which they were made."""
    found = []
    with contextlib.suppress(OSError):
        for line in FILE.read_bytes().splitlines():
            mount, _, kind = line.partition(b" - ")
            _, _, device, root, point, *_ = mount.split()
            found.append(Mount(device, _path(root), _path(point), os.fsdecode(kind.split()[0])))
    return found


def kernels() -> set[Path]:
    """Where file systems of the kernel are mounted, and no other one is on top.

    Links in `/proc` lead to the files of other processes, which a mount that cannot be written does not protect.
    """
    top = {mount.point: mount.kind for mount in mounts()}
    return {point for point, kind in top.items() if kind in KERNELS}


def is_kernels(folder: Path) -> bool:
    """Whether a folder, given by its real path, is in a file system of the kernel."""
    own = _own(folder, mounts())
    return own is not None and own.kind in KERNELS


def paths(*folders: Path) -> Iterator[Path]:
    """All paths of folders that are given by their real paths: bind mounts can show them at others, too."""
    known = mounts()
    for folder in folders:
        yield folder
        yield from _others(folder, known)


def _others(folder: Path, known: list[Mount]) -> Iterator[Path]:
    own = _own(folder, known)
    if own is None:
        return
    place = own.root / folder.relative_to(own.point)
    for mount in known:
        if mount.device == own.device and place.is_relative_to(mount.root):
            path = mount.point / place.relative_to(mount.root)
            with contextlib.suppress(OSError):  # another mount hides it
                if path != folder and os.path.samefile(path, folder):
                    yield path


def _own(folder: Path, known: list[Mount]) -> Mount | None:
    """The mount that a folder is in: the innermost one, and the last of those at one point."""
    around = [mount for mount in reversed(known) if folder.is_relative_to(mount.point)]
    return max(around, key=lambda mount: len(mount.point.parts), default=None)


def _path(text: bytes) -> Path:
    """A path in which spaces and the like are octal numbers."""
    return Path(os.fsdecode(re.sub(rb"\\([0-7]{3})", lambda octal: bytes([int(octal[1], 8)]), text)))
