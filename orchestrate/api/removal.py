"""What jobs and clusters have in the engines, and its removal."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from orchestrate import errors
from orchestrate.console import out
from orchestrate.errors import UsageError
from orchestrate.host import records
from orchestrate.record.paths import JobPaths

if TYPE_CHECKING:
    from orchestrate.engines.base import Engine


def resources(engines: list[Engine], name: str) -> list[tuple[Engine, str]]:
    """Return all resources of a job, each with its engine; raises UsageError for another user's job."""
    for engine in engines:
        for state in engine.jobs():
            if state.job_id == name and state.owner not in (os.getuid(), -1):
                raise UsageError(f"{name} belongs to user {state.owner}", "ask them to stop it")
    return [(engine, resource) for engine in engines for resource in engine.resources(name)]


def remove(paths: JobPaths, resources: list[tuple[Engine, str]]) -> None:
    """Remove the resources of a job, and the end of its record."""
    for engine in {id(engine): engine for engine, _ in resources}.values():
        engine.remove(paths.root.name, grace=30)
    records.end(paths.root)


def show(resources: list[tuple[Engine, str]], *others: str) -> int:
    """Print what a command would remove; return the exit code."""
    for resource in [*(resource for _, resource in resources), *others]:
        out(resource)
    return errors.SUCCEEDED
