"""Jobs and clusters, running or ended, as `ps` lists them."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from orchestrate.cli.find import created_at, job_folders
from orchestrate.dataclass import dataclass, field
from orchestrate.engines import registry
from orchestrate.engines.base import JobState
from orchestrate.errors import UsageError
from orchestrate.files.lines import last
from orchestrate.files.paths import METRICS
from orchestrate.host import claims, owners, records
from orchestrate.record import lock, metrics, run_dir
from orchestrate.record.paths import JobPaths
from orchestrate.spec.sizes import format_bytes
from orchestrate.spec.spec import JobSpec

STILL_SUPERVISED = 3600.0  # seconds after its end in which a job may still have a supervisor, which copies its record
TAIL = 64 << 10  # last bytes of metrics.jsonl that are read


@dataclass(frozen=True)
class Listed:
    """A job or cluster."""

    name: str
    engine: str
    nodes: int  # that exist now
    state: str  # for display
    run: Path | None  # its run directory; None for a job in the queue, which has none yet
    started: float  # in seconds since 1970; 0 if unknown
    seconds: float | None = None  # duration, if it has ended
    metrics: dict[str, Any] = field(default_factory=dict)  # last values


def current(runs: Path) -> Iterator[Listed]:
    """Yield clusters, jobs with nodes of their own or on a cluster, and jobs with a supervisor but no nodes."""
    shown = set()
    for state in registry.jobs():
        busy = lock.supervisor(state.paths)
        if state.cluster:
            status = _of_cluster(state, busy)
        elif busy:
            status = "pending" if busy.waits() else "running"
        else:
            status = "no supervisor"
        if state.owner not in (-1, os.geteuid()):
            status = _of_another(state, status)
        shown.add(state.job_id)
        facts = (state.job_id, state.engine, state.nodes, status, state.paths.root, created_at(state.paths))
        yield Listed(*facts, metrics=_metrics(state.paths))
        ours = state.cluster and records.find(state.paths.root)  # another account's folder may be closed
        for paths in run_dir.on_cluster(state.paths.root.parent, state.job_id) if ours else ():
            if (holder := lock.supervisor(paths)) or not os.path.lexists(paths.report):
                shown.add(paths.root.name)
                yield from _supervised(paths, f"{'running' if holder else 'no supervisor,'} on {state.job_id}")
    for folder in job_folders(runs, since=time.time() - STILL_SUPERVISED):
        paths = JobPaths(folder)
        if folder.name in shown:
            continue
        if lock.supervisor(paths):
            yield from _supervised(paths, "running")
        elif not os.path.lexists(paths.report) and records.find(folder):  # after a reboot, for example
            yield from _supervised(paths, "no supervisor")


def queued() -> Iterator[Listed]:
    """Yield the jobs of all accounts that wait for GPUs, in the order of the queue."""
    found = claims.found()
    used = claims.users("", found)
    for claim in found:
        if claim.among:
            holders = ", ".join(dict.fromkeys(str(used[each]) for each in claim.among if each in used))
            state = f"waits for {claims.wanted(claim.among, claim.count)}" + f", in use by {holders}" * bool(holders)
            yield Listed(str(claim), "", 0, state, None, claim.since / 1e9)


def _of_another(state: JobState, status: str) -> str:
    """The state of another account's job or cluster: only root can see whether it has a supervisor."""
    of = f"of {owners.person(state.owner)}"
    return ", ".join([of, *status.split(", ")[1:]]) if os.geteuid() else f"{status}, {of}"


def ended(runs: Path) -> Iterator[Listed]:
    """Yield the jobs in `runs` that have ended, the newest first."""
    for paths in sorted(map(JobPaths, job_folders(runs)), key=created_at, reverse=True):
        if data := run_dir.ended(paths):
            yield Listed(
                paths.root.name,
                str(data.get("engine", "")),
                0,
                str(data["outcome"]),
                paths.root,
                created_at(paths),
                data["duration_s"],
                metrics.shown(data.get("final_metrics")),
            )


def ended_at(paths: JobPaths) -> float:
    """Return the time at which a job ended, in seconds since 1970; raises OSError if it has not."""
    return paths.report.lstat().st_mtime


def _supervised(paths: JobPaths, state: str) -> Iterator[Listed]:
    with contextlib.suppress(UsageError):  # its files are unreadable
        spec, plan = run_dir.load(paths)
        nodes = len(plan.nodes) if plan.placement.cluster else 0
        facts = (plan.job_id, plan.engine, nodes, state, paths.root, created_at(paths))
        yield Listed(*facts, metrics=_metrics(paths, spec))


def _metrics(paths: JobPaths, spec: JobSpec | None = None) -> dict[str, Any]:
    """Return the last metrics that the script of a running job has written, without secrets."""
    found: dict[str, Any] = {}
    with contextlib.suppress(OSError), paths.folder.open(METRICS) as file:
        for row in metrics.fold(line for line in last(file, TAIL) if line):
            found |= metrics.shown(row)
    with contextlib.suppress(UsageError):
        return {**(spec or run_dir.load(paths)[0]).mask().inside(found)} if found else {}
    return {}


def _of_cluster(state: JobState, busy: object) -> str:
    """Describe the state of a cluster: its memory, and the minutes until its nodes end by themselves."""
    if busy:
        return "in use"
    from orchestrate.api import cluster  # only here: it takes time to import

    left = None
    with contextlib.suppress(UsageError, OSError):
        left = cluster.Cluster(state.paths, *run_dir.load(state.paths)).seconds_left()
    if left is not None and left <= 0:
        return "expired"
    holds = [f"holds {format_bytes(size)}"] if (size := registry.memory(state)) else []
    return ", ".join(["idle", *holds, *([] if left is None else [f"{math.ceil(left / 60)} min left"])])


def ago(then: float) -> str:
    """Format the time since `then`: `3 min ago`."""
    return f"{duration(max(0.0, time.time() - then))} ago"


def duration(seconds: float) -> str:
    """Format a duration with one unit: `33 s`, `5 min`, `7 h`, `12 d`."""
    for unit, size, most in (("s", 1, 120), ("min", 60, 7200), ("h", 3600, 48 * 3600)):
        if seconds < most:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86400:.0f} d"
