"""What the workers of a running job use, for other processes: written by its supervisor while one of them asks."""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Mapping

from orchestrate.files.folder import content
from orchestrate.host import records
from orchestrate.node.messages import checks
from orchestrate.record.outcomes import Activity
from orchestrate.record.paths import JobPaths

ASKED_FOR = 10.0  # seconds for which the supervisor writes after it was asked


def ask(paths: JobPaths) -> None:
    """Ask the supervisor of a job to write what its workers use; raises OSError."""
    with records.pinned(paths.root) as run:
        descriptor = os.open(run / paths.usage_asked.name, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        os.utime(descriptor)
    finally:
        os.close(descriptor)


def asked(paths: JobPaths) -> bool:
    """Whether another process has asked recently."""
    with contextlib.suppress(OSError):
        recently = abs(time.time() - paths.usage_asked.lstat().st_mtime) < ASKED_FOR
        return recently and not records.replaced(paths.root)
    return False


def write(paths: JobPaths, found: Mapping[int, Activity]) -> None:
    """Write what the workers use, by rank; raises OSError."""
    rows = {
        rank: {"state": doing.state, "cpu": doing.cpu, "memory": doing.memory, "pid": doing.pid}
        for rank, doing in found.items()
    }
    records.put(paths.usage, json.dumps({"time": time.time(), "workers": rows}) + "\n")


def read(paths: JobPaths) -> tuple[float, dict[int, Activity]]:
    """Return when the supervisor wrote the file, in seconds since 1970, and its content; 0 if there is none."""
    try:
        checks.limit_values((text := content(paths.usage)).encode(), checks.MAX_VALUES)
        data = json.loads(text)
        rows, written = data["workers"].items(), float(data["time"])
        if why := next(filter(None, map(checks.doing, data["workers"].values())), ""):
            raise ValueError(why)
        found = {
            int(rank): Activity(str(row["state"]), float(row["cpu"]), int(row["memory"]), pid=int(row.get("pid", 0)))
            for rank, row in rows
        }
        numbers = [written, *(doing.cpu for doing in found.values())]
        return (written, found) if all(map(math.isfinite, numbers)) and written <= time.time() else (0.0, {})
    except (OSError, ValueError, OverflowError, TypeError, KeyError, AttributeError, RecursionError):
        return 0.0, {}


def remove(paths: JobPaths) -> None:
    """Remove the files, once the job has ended; raises OSError."""
    for path in (paths.usage, paths.usage_asked):
        records.drop(path)
