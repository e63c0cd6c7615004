"""What jobs of a test have left: processes, sockets and objects of the engine."""

import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

from support.processes import proc, processes

SOCKETS = Path(f"/tmp/orchestrate-{os.getuid()}")  # of nodes of the process engine
DOCKER_REQUIRED = os.environ.get("ORCHESTRATE_REQUIRE_DOCKER") == "1"


@functools.cache
def docker_answers() -> bool:
    commands = (["docker", "info"], ["docker", "compose", "version"])
    return shutil.which("docker") is not None and all(
        subprocess.run(command, capture_output=True).returncode == 0 for command in commands
    )


def docker(*arguments: str) -> str:
    try:
        return subprocess.run(["docker", *arguments], capture_output=True, text=True, check=True).stdout
    except subprocess.CalledProcessError as error:
        error.add_note(error.stderr)
        raise


def _leads_to(path: Path) -> str:
    """Where a link leads; empty if another test has just removed it."""
    try:
        return os.path.realpath(path)
    except FileNotFoundError:
        return ""


def leftovers(folder: Path) -> dict[str, list[str]]:
    """Everything that jobs from a folder have left: processes, sockets of nodes, containers, networks, volumes.

    Tests in other folders run at the same time, so only what carries the name of this folder or of one of its jobs
    is returned.
    """
    jobs = {path.parent.name for depth in ("", "*/") for path in folder.glob(f"{depth}*/*/job.yaml")}
    jobs.discard("orchestrate")  # a record in a store, and not a job: helper containers of all tests begin with it
    sockets = [*SOCKETS.glob("*"), *folder.glob("**/runs/*/sockets")]
    found = {
        "processes": [line for pid in processes(folder) if (line := " ".join(proc(pid, "cmdline")).strip())],
        "sockets": [
            str(path)
            for path in sockets
            if path.name in jobs or path.name == "sockets" or f"{folder}/" in _leads_to(path / "run")
        ],
    }
    for kind in ("container", "network", "volume") if docker_answers() else ():
        lines = docker(kind, "ls", *(["--all", "--no-trunc"] if kind == "container" else []), "--format", "{{json .}}")
        objects = [json.loads(line) for line in lines.splitlines()]
        text = {thing.get("Name") or thing["Names"]: f"{thing['Labels']} {thing.get('Mounts')}" for thing in objects}
        found[kind] = [
            name
            for name in text
            if f"{folder}/" in text[name] or any(name.startswith((f"{job}-", f"{job}_")) for job in jobs)
        ]
    return {kind: names for kind, names in found.items() if names}


def clear(folder: Path) -> None:
    """Kill and remove what jobs from a folder have left."""
    for pid in processes(folder):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for kind, names in leftovers(folder).items():
        if kind in ("container", "network", "volume"):
            docker(kind, "rm", "--force", *names)
    for path in leftovers(folder).get("sockets", ()):
        shutil.rmtree(path, ignore_errors=True)
