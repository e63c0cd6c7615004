"""Mounts of this machine, from `/proc/self/mountinfo` (proc(5)); empty on other systems."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from orchestrate.dataclass import dataclass

FILE = Path("/proc/self/mountinfo")
KERNEL_TYPES = {
    *("proc", "sysfs", "devpts", "devtmpfs", "cgroup", "cgroup2", "mqueue", "hugetlbfs", "nsfs", "bpf"),
    *("binfmt_misc", "configfs", "debugfs", "efivarfs", "fusectl", "pstore", "rpc_pipefs", "securityfs", "tracefs"),
}


@dataclass(frozen=True)
class Mount:
    """The folder `root` of a file system, mounted at `point`."""

    device: bytes  # major:minor of the file system
    root: Path
    point: Path
    kind: str  # the type of the file system


def mounts() -> list[Mount]:
    """Return all mounts in order of creation."""
    found = []
    with contextlib.suppress(OSError):
        for line in FILE.read_bytes().splitlines():
            mount, _, kind = line.partition(b" - ")
            _, _, device, root, point, *_ = mount.split()
            found.append(Mount(device, _path(root), _path(point), os.fsdecode(kind.split()[0])))
    return found


def kernels() -> set[Path]:
    """Return mount points of the kernel's file systems, unless another mount is on top.

    Links in `/proc` lead to files of other processes, which a read-only mount does not protect.
    """
    top = {mount.point: mount.kind for mount in mounts()}
    return {point for point, kind in top.items() if kind in KERNEL_TYPES}


def is_kernels(folder: Path) -> bool:
    """Whether a folder, given by its real path, is in a file system of the kernel."""
    mount = _mount_of(folder, mounts())
    return mount is not None and mount.kind in KERNEL_TYPES


def paths(*folders: Path) -> Iterator[Path]:
    """Yield all paths of folders, given by their real paths: bind mounts may show them at more."""
    known = mounts()
    for folder in folders:
        yield folder
        yield from _other_paths(folder, known)


def _other_paths(folder: Path, known: list[Mount]) -> Iterator[Path]:
    outer = _mount_of(folder, known)
    if outer is None:
        return
    inner = outer.root / folder.relative_to(outer.point)
    for mount in known:
        if mount.device == outer.device and inner.is_relative_to(mount.root):
            path = mount.point / inner.relative_to(mount.root)
            with contextlib.suppress(OSError):  # hidden by another mount
                if path != folder and os.path.samefile(path, folder):
                    yield path


def _mount_of(folder: Path, known: list[Mount]) -> Mount | None:
    """Return the mount that contains a folder: the innermost, and the last one if several share a mount point."""
    around = [mount for mount in reversed(known) if folder.is_relative_to(mount.point)]
    return max(around, key=lambda mount: len(mount.point.parts), default=None)


def _path(text: bytes) -> Path:
    """Decode a path in which spaces and similar characters are octal numbers."""
    return Path(os.fsdecode(re.sub(rb"\\([0-7]{3})", lambda octal: bytes([int(octal[1], 8)]), text)))
