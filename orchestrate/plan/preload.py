"""Select the modules that nodes import ahead of time: torch, if the script imports it, and those of the job file."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from orchestrate.console import print_message
from orchestrate.files import sandbox
from orchestrate.plan import imports
from orchestrate.spec.spec import APP, JobSpec

TORCH = ("torch", "torch.distributed")
DYNAMO = "torch._dynamo"  # imported by the constructors of DDP and of optimizers; takes 0.5 to 2 seconds
MAX_CPU_SECONDS = 3  # seconds of CPU time to read a script and its imports


_started: dict[tuple[tuple[str, ...], Path], Future[Sequence[str]]] = {}  # calls of `start`, by command and folder


def start(spec: JobSpec, folder: Path) -> None:
    """Read the imports of a job's script in the background; `preload` with the same arguments takes the result."""
    if spec.warm:
        folder = folder / spec.chdir
        _started[tuple(spec.command), folder] = ThreadPoolExecutor(1).submit(uses, tuple(spec.command), folder)


def preload(spec: JobSpec, folder: Path, copied: bool = False) -> tuple[str, ...]:
    """The modules that nodes import before workers start; empty if workers get fresh interpreters.

    They are torch's, if the script or a file in `folder` that it imports imports torch, and those of the job file. A
    script that takes too long to parse counts as importing nothing.

    If workers run in a copy of the folder (`copied`), modules in it are left out: those of the copy would differ.
    """
    if not spec.warm:
        return ()
    folder = folder / spec.chdir
    started = _started.pop((tuple(spec.command), folder), None)
    used = started.result() if started else uses(tuple(spec.command), folder)
    if "ray" in used and spec.trainers:
        print_message("warning: the script imports ray: ray.init() without an address starts a cluster in each worker")
        print_message("hint: use one worker: --nodes 1")
    if "spawn" in used:
        print_message("warning: the script starts workers with mp.spawn(), and the job starts it on each node")
        print_message("hint: call the function itself, with the rank in $RANK: orchestrate help script")
    elif "address" in used and spec.trainers:
        print_message("warning: the script sets MASTER_ADDR or MASTER_PORT, where the workers of a job do not meet")
        print_message("hint: leave them to the job, as it sets RANK and WORLD_SIZE: orchestrate help script")
    frameworks = not {*imports.FRAMEWORKS}.isdisjoint(used)
    torch, dynamo = "torch" in used or frameworks, DYNAMO in used or frameworks
    found = [*TORCH, DYNAMO][: (len(TORCH) + dynamo) * torch]
    return (*found, *(name for name in spec.preload if name not in found and not (copied and _is_in(folder, name))))


def _is_in(folder: Path, module: str) -> bool:
    name = module.partition(".")[0]
    return (folder / name).is_dir() or (folder / f"{name}.py").exists()


def uses(command: tuple[str, ...], folder: Path) -> Sequence[str]:
    """Torch, Dynamo and frameworks that a script imports, by their names; none if it takes too long to parse.

    A spec without a command has that of the example, and nodes without a job are warm for any: these are not searched.
    """
    if command == APP:
        return "torch", DYNAMO
    return sandbox.call(imports.uses, command, str(folder), seconds=MAX_CPU_SECONDS) or ()
