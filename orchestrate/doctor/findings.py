"""Findings of `doctor`, and its checks that do not need Docker's SDK: torch and GPUs of local processes."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from importlib import metadata

from orchestrate.dataclass import dataclass
from orchestrate.engines import check_cache
from orchestrate.errors import ResourceError
from orchestrate.host.gpus import Gpu, look, why_none
from orchestrate.spec.sizes import format_bytes

GOOD, WARNING, BAD = "ok", "warning", "error"


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    state: str  # ok, warning or error
    what: str
    hint: str = ""
    code: int = ResourceError.exit_code  # exit code of the command, if this is an error


def local() -> Iterator[Finding]:
    """Check whether local processes find torch and can use the GPUs of this machine."""
    try:
        yield Finding(GOOD, f"local processes: torch {metadata.version('torch')} in {sys.executable}")
    except metadata.PackageNotFoundError:
        hint = f"{sys.executable} -m pip install torch"
        yield Finding(WARNING, f"local processes: torch is not installed in {sys.executable}", hint)
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
    for gpu in found:
        memory = f", {format_bytes(gpu.total)}" if gpu.total else ""
        yield Finding(GOOD, f"{gpu}: {gpu.name}{memory}{gpu.driver and f', driver {gpu.driver}'}")
    if any(not gpu.persistent and not gpu.display for gpu in found):
        what = "persistence mode is off: each job waits several seconds for the driver to load"
        yield Finding(WARNING, what, "sudo nvidia-smi -pm 1, or enable the service nvidia-persistenced")
