"""Nodes and files created by another version or on another machine, and the commands that remove them."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrate.errors import UsageError
from orchestrate.files.paths import NODES, JobPaths
from orchestrate.job import store

if TYPE_CHECKING:
    from orchestrate.engines.base import Engine

REMOVE_COMMANDS = {
    "container": "docker rm -f",
    "process": "kill",
    "service": "docker service rm",
    "secret": "docker secret rm",
    "network": "docker network rm",
    "folder": "rm -r",
}


def refuse(name: str, runs: Path, engines: list[Engine]) -> None:
    """Raise UsageError if a job or cluster of this name or prefix exists, but its files cannot be read."""
    states = [state for engine in engines for state in engine.jobs() if state.owner in (os.getuid(), -1)]
    running = {state.job_id: state.paths.root for state in states}
    roots = running | {path.parent.name: path.parent for path in runs.resolve().glob(f"*/{NODES}")}
    here = {
        found for found in roots if found.startswith(name) and (roots[found] / found).is_relative_to(runs.resolve())
    }
    for found in sorted(here | ({name} & roots.keys())):
        with contextlib.suppress(UsageError):
            store.load(JobPaths(roots[found]))
            continue
        things = [thing for engine in engines for thing in engine.resources(found)]
        command = removal(things if running.get(found) == roots[found] else [])
        files = f"its files are in {roots[found]}" if roots[found].name == found and roots[found].exists() else ""
        raise UsageError(
            f"{found} was created by another version of orchestrate, or its files were moved or copied",
            "; ".join(filter(None, (command, files))),
        )


def removal(things: Iterable[str]) -> str:
    """Return a command line that removes `things`, as `Engine.holds` lists them."""
    names: dict[str, list[str]] = {}
    for thing in things:
        kind, _, name = thing.partition(" ")
        names.setdefault(kind, []).append(name.split()[0] if kind == "process" else name)
    return " && ".join(f"{REMOVE_COMMANDS[kind]} {shlex.join(names[kind])}" for kind in names)
