"""Which modules nodes import ahead of time: those of torch that a script imports, and those of the job file."""

from __future__ import annotations

from pathlib import Path

from orchestrate.files import bounded
from orchestrate.job import imports
from orchestrate.job.spec import JobSpec

TORCH = ("torch", "torch.distributed")
DYNAMO = "torch._dynamo"  # which the constructors of DDP and of the optimizers import: half a second to two
MAX_CPU_SECONDS = 3  # seconds of processor time to read a script with all that it imports


def may_use_torch(spec: JobSpec, modules: tuple[str, ...]) -> bool:
    """Whether workers may use torch: `modules` has it, or the command is not a script, whose imports were read."""
    return "torch" in modules or not spec.command[0].endswith(".py")


def preload(spec: JobSpec, folder: Path) -> tuple[str, ...]:
    """The modules that nodes import before there is any worker; none where workers get fresh interpreters.

    Those are torch's, where the script or a file of `folder` that it imports does import torch, and those of the job
    file. A script that takes too long to parse counts as one that imports nothing.
    """
    if not spec.warm:
        return ()
    torch, dynamo = bounded.call(imports.uses, spec.command, str(folder), seconds=MAX_CPU_SECONDS) or (False, False)
    found = [*TORCH, DYNAMO][: (len(TORCH) + dynamo) * torch]
    return (*found, *(name for name in spec.preload if name not in found))
