"""What was found out about an image, or about torch on this machine, and is kept beside the records."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from importlib import metadata

from orchestrate.console import during
from orchestrate.files import private, records
from orchestrate.files.folder import content, write_whole
from orchestrate.job.gpus import Gpu

FOLDER = "looked"
COMPUTE_TIMEOUT = 120  # seconds that torch may take to compute on all GPUs
# Computes on each GPU: a build of torch without code for a GPU finds it available all the same.
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
    """What a result is noted for: an image or an interpreter, these GPUs, and their driver."""
    return ["cuda", *where, *sorted(f"{gpu.id} {gpu.driver}" for gpu in gpus)]


def cuda(key: list[str], said: str, failure: str = "") -> str:
    """Why torch cannot use GPUs, by what `CUDA` printed, or why that could not run; empty, and noted, if it can."""
    if said in ("works", "no torch"):
        note(key, said)
        return ""
    return said or failure or "torch exited without output"


def _name(key: list[str]) -> str:
    return f"{hashlib.sha256(json.dumps(key).encode()).hexdigest()}.txt"


def known(key: list[str]) -> str:
    """What was noted of an image; an image that changes has another id."""
    for place in records.places():
        with contextlib.suppress(OSError, ValueError), private.opened(place / FOLDER) as folder:
            return content(_name(key), folder)
    return ""


def note(key: list[str], value: str) -> None:
    """Note what need not be found out again."""
    for place in records.places():
        with contextlib.suppress(OSError):
            private.make(place / FOLDER)
            with private.opened(place / FOLDER) as folder:
                return write_whole(_name(key), value, folder)


@during("trying the GPUs with torch")
def useless(gpus: Sequence[Gpu]) -> str:
    """Why this interpreter's torch cannot use these GPUs; empty if it can, or if there is no torch."""
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return ""
    key = cuda_key([sys.executable, version], gpus)
    if known(key):
        return ""
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(gpu.id for gpu in gpus)}
    command = [sys.executable, "-I", "-c", CUDA]
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=COMPUTE_TIMEOUT)
    except (OSError, subprocess.TimeoutExpired) as error:
        return cuda(key, "", str(error))
    return cuda(key, (done.stdout.strip().splitlines() or [""])[-1])
