"""Cached results of checks: Python in an image, and torch with GPUs; stored next to the records."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence

from orchestrate.console import called, during
from orchestrate.files.folder import content, write_whole
from orchestrate.host import private, records
from orchestrate.host.gpus import Gpu

FOLDER = "checks"
WELL = ("works", "no torch")
# Why torch cannot use a GPU until the image or the driver changes; others, such as a GPU that is busy, may pass.
LASTING = re.compile(
    r"no NVIDIA driver|no CUDA-capable device|not compiled with CUDA|no kernel image|driver version is insufficient"
    r"|driver on your system is too old"
)
COMPUTE_TIMEOUT = 120  # seconds for torch to compute on all GPUs
# Computes on each GPU: torch reports a GPU as available even if its build has no code for it.
CUDA = """
import sys
say = sys.stdout.write
try:
    import torch
except ImportError:
    say("no torch")
else:
    try:
        torch.cuda.init()
        for number in range(torch.cuda.device_count()):
            (torch.ones(8, device=f"cuda:{number}") * 2).sum().item()
        say("works")
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        say(f"torch {torch.__version__}: {lines[0].split('. ')[0]}")
"""


def cuda_key(where: list[str], gpus: Iterable[Gpu]) -> list[str]:
    """Return the cache key of a GPU check: an image or interpreter, the GPUs, and their driver."""
    return ["cuda", *where, *sorted(f"{gpu.id} {gpu.driver}" for gpu in gpus)]


def cuda(key: list[str], output: str, failure: str = "") -> str:
    """Interpret the output of `CUDA`: return why torch cannot use the GPUs; empty if it can. Cached if that lasts."""
    if output in WELL or LASTING.search(output):
        store(key, output)
    return "" if output in WELL else output or failure or "torch exited without output"


def known(key: list[str]) -> str | None:
    """Return the cached answer of `cuda`; None if there is none."""
    found = cached(key)
    if not found:
        return None
    return "" if found in WELL else f"{found} (a cached result, which {called()} doctor removes)"


def forget() -> None:
    """Forget all results, so that the checks are made again."""
    for place in records.places():
        with contextlib.suppress(OSError), private.opened(place / FOLDER) as folder:
            for name in os.listdir(folder):
                os.unlink(name, dir_fd=folder)


def _file_name(key: list[str]) -> str:
    return f"{hashlib.sha256(json.dumps(key).encode()).hexdigest()}.txt"


def cached(key: list[str]) -> str:
    """Return the cached result for a key, or an empty string."""
    for place in records.places():
        with contextlib.suppress(OSError, ValueError), private.opened(place / FOLDER) as folder:
            return content(_file_name(key), folder)
    return ""


def store(key: list[str], value: str) -> None:
    """Cache a result."""
    for place in records.places():
        with contextlib.suppress(OSError):
            private.make(place / FOLDER)
            with private.opened(place / FOLDER) as folder:
                return write_whole(_file_name(key), value, folder)


@during("testing the GPUs with torch")
def gpu_problem(gpus: Sequence[Gpu]) -> str:
    """Return why this interpreter's torch cannot use the GPUs; empty if it can, or if torch is not installed."""
    from importlib import metadata  # only here: it takes time to import

    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return ""
    key = cuda_key([sys.executable, version], gpus)
    if (found := known(key)) is not None:
        return found
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(gpu.id for gpu in gpus)}
    command = [sys.executable, "-I", "-c", CUDA]
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=COMPUTE_TIMEOUT)
    except (OSError, subprocess.TimeoutExpired) as error:
        return cuda(key, "", str(error))
    return cuda(key, (done.stdout.strip().splitlines() or [""])[-1])
