"""Stacks of the workers of a running job, for another process: its supervisor writes them when that asks."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping

from orchestrate.files.folder import content
from orchestrate.host import records
from orchestrate.node.messages import checks
from orchestrate.record.outcomes import Stack
from orchestrate.record.paths import JobPaths


def ask(paths: JobPaths) -> None:
    """Ask the supervisor of a job for the stacks of its workers; raises OSError."""
    with records.pinned(paths.root) as run:
        os.close(os.open(run / paths.stacks_asked.name, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600))


def asked(paths: JobPaths) -> bool:
    """Return whether another process has asked, and has no answer yet."""
    return os.path.lexists(paths.stacks_asked) and not records.replaced(paths.root)


def answer(paths: JobPaths, found: Mapping[int, Stack]) -> None:
    """Write the stacks of running workers, by rank; raises OSError."""
    records.drop(paths.stacks_asked)
    rows = {rank: [stack.text, stack.why, stack.state] for rank, stack in found.items()}
    records.put(paths.stacks, json.dumps(rows) + "\n")


def read(paths: JobPaths) -> dict[int, Stack] | None:
    """Return the stacks of running workers, by rank; None if they have not been written."""
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError, RecursionError):
        checks.limit_values((text := content(paths.stacks)).encode(), checks.MAX_VALUES)
        return {int(rank): Stack(*map(str, row)) for rank, row in json.loads(text).items()}
    return None


def remove(paths: JobPaths) -> None:
    """Remove the files; raises OSError."""
    for path in (paths.stacks, paths.stacks_asked):
        records.drop(path)
