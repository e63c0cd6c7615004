"""Which job a command is about: by its name, how it begins, or as the latest one."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrate.cli import older
from orchestrate.errors import UsageError
from orchestrate.files import records
from orchestrate.files.paths import NAME, JobPaths
from orchestrate.job import owners

if TYPE_CHECKING:
    from orchestrate.engines.base import Engine

MAX_SHOWN = 8  # jobs that an error names


def job_folders(runs: Path) -> list[Path]:
    """The run directories of jobs that are ours, without those of clusters."""
    folders = [path.parent for path in sorted(runs.glob("*/plan.json")) if os.path.lexists(JobPaths(path.parent).spec)]
    ours = [folder for folder in folders if NAME.fullmatch(folder.name) and not owners.foreign(folder)]
    return [folder for folder in ours if not JobPaths(folder).nodes.exists()]


def find(args: argparse.Namespace, engines: list[Engine]) -> Path:
    """The run directory of the job that `args.job` names or begins, living or ended.

    Raises UsageError for one that another user could have made, or can change: what is in it proves nothing.
    """
    states = [state for engine in engines for state in engine.jobs() if not state.cluster and state.named]
    living = {state.job_id: state.paths.root for state in states}
    here = {folder.name: folder for folder in job_folders(args.runs)}
    runs = here | living
    begun = [name for name in runs if name.startswith(args.job)]
    ours = [name for name in begun if name in living or records.find(runs[name])]
    found = [args.job] if args.job in ours else [name for name in ours if name in living] or ours
    found = found or [name for name in begun if name == args.job]  # made on another machine or by another account
    folder = runs[found[0]] if found else args.runs / args.job
    if why := owners.foreign(folder):
        raise UsageError(f"{folder} is not a run directory of yours: {why}", "python -m orchestrate ps lists your jobs")
    if folder.parent != args.runs:
        owners.check(folder.parent)
    if not found:
        older.refuse(args.job, args.runs, engines)
    if len(found) != 1:
        what = f"{args.job} is the prefix of {len(found)} jobs" if found else f"no job {args.job}"
        known = _newest([JobPaths(runs[name]) for name in found or here])
        more = f" and {len(known) - MAX_SHOWN} more" if len(known) > MAX_SHOWN else ""
        names = ", ".join(paths.root.name for paths in known[:MAX_SHOWN]) + more
        none = f"no jobs in {args.shown}; use --runs for another folder"
        hint = f"jobs in {args.shown}: {names}" if known else none
        raise UsageError(what, hint)
    return folder


def latest(runs: Path, shown: Path) -> str:
    """The job of this account that was made last; raises UsageError where there is none."""
    ours = [JobPaths(folder) for folder in job_folders(runs) if records.find(folder)]
    if not ours:
        raise UsageError(f"no jobs in {shown}", "use --runs for another folder")
    return _newest(ours)[0].root.name


def _newest(jobs: list[JobPaths]) -> list[JobPaths]:
    """Jobs in order of their making, the newest first."""
    return sorted(jobs, key=lambda paths: (_made(paths), paths.root.name), reverse=True)


def _made(paths: JobPaths) -> int:
    """When a job was made: its file is written once."""
    try:
        return paths.spec.lstat().st_mtime_ns
    except OSError:
        return 0
