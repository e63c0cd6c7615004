"""Checks of this machine that need no engine: torch and GPUs of local processes, disk, memory, MTU."""

from __future__ import annotations

import os
import resource
import shutil
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

from orchestrate.doctor.findings import GOOD, WARNING, Finding
from orchestrate.engines import check_cache
from orchestrate.host.gpus import Gpu, claimed, look, why_none
from orchestrate.spec.sizes import format_bytes

LITTLE_DISK = 10 << 30  # bytes: the image and a few checkpoints
LITTLE_SHARED_MEMORY = 1 << 30  # bytes: what nodes in containers get by default
ETHERNET = 1500  # bytes


def torch_version() -> str:
    """Return the version of torch that local processes find; empty if there is none."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return ""


def local() -> Iterator[Finding]:
    """Check whether local processes find torch and can use the GPUs of this machine."""
    if version := torch_version():
        yield Finding(GOOD, f"local processes: torch {version} in {sys.executable}")
    else:
        hint = f"{sys.executable} -m pip install torch"
        yield Finding(WARNING, f"local processes: torch is not installed in {sys.executable}", hint)
    yield from disk(Path.cwd(), "this folder")
    yield from limits()
    found = look()
    yield from gpus(found)
    if found and (why := check_cache.gpu_problem(found)):
        hint = "install a build of torch for this driver: nvidia-smi shows the newest CUDA version that it supports"
        yield Finding(WARNING, f"local processes cannot use the GPUs: {why}", hint)


def gpus(found: Sequence[Gpu]) -> Iterator[Finding]:
    """Report the GPUs of this machine and their driver."""
    if not found:
        why = why_none()
        yield Finding(WARNING if why.startswith("nvidia-smi") else GOOD, why)
    for gpu in claimed(tuple(found), ""):
        memory = f", {format_bytes(gpu.total)}" if gpu.total else ""
        yield Finding(GOOD, f"{gpu}: {gpu.name}{memory}{gpu.driver and f', driver {gpu.driver}'}")
    if any(not gpu.persistent and not gpu.display for gpu in found):
        what = "persistence mode is off: each job waits several seconds for the driver to load"
        yield Finding(WARNING, what, "sudo nvidia-smi -pm 1, or enable the service nvidia-persistenced")


def disk(folder: Path, of: str) -> Iterator[Finding]:
    """Report the free space of the disk that a folder is on, if the folder exists here."""
    try:
        free = shutil.disk_usage(folder).free
    except (OSError, ValueError):
        return
    hint = "free disk space: docker system df, and python -m orchestrate prune --caches, show what can be removed"
    few = free < LITTLE_DISK
    yield Finding(WARNING if few else GOOD, f"{format_bytes(free)} free on the disk of {of}", hint if few else "")


def limits() -> Iterator[Finding]:
    """Report shared memory, and, on a machine with RDMA, locked memory: what local processes can use."""
    path = Path("/dev/shm")
    if path.is_dir():
        free = shutil.disk_usage(path).free
        few = free < LITTLE_SHARED_MEMORY
        hint = "remove files from it, or sudo mount -o remount,size=8g /dev/shm" if few else ""
        yield Finding(WARNING if few else GOOD, f"{format_bytes(free)} free in {path}", hint)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if os.path.isdir("/sys/class/infiniband") and locked != resource.RLIM_INFINITY:
        what = f"local processes can lock only {format_bytes(locked)} of memory, which RDMA needs"
        yield Finding(WARNING, what, "add 'memlock unlimited' to /etc/security/limits.conf, and log in again")


def link_mtu() -> int | None:
    """Return the MTU of the interface of the default route, in bytes; None if unknown."""
    try:
        routes = [line.split() for line in Path("/proc/net/route").read_text().splitlines()[1:]]
        interface = next(route[0] for route in routes if route[1] == "00000000")
        return int(Path("/sys/class/net", interface, "mtu").read_text())
    except (OSError, ValueError, StopIteration):
        return None
