"""Find the job that a command names: by name, by unique prefix, or as the latest."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrate.cli.args import Args
from orchestrate.cli.options import LATEST, RUNS
from orchestrate.cli.table import COMMANDS
from orchestrate.engines import registry
from orchestrate.errors import UsageError
from orchestrate.files.paths import NAME
from orchestrate.host import claims, owners, records
from orchestrate.record import run_dir
from orchestrate.record.paths import JobPaths

if TYPE_CHECKING:
    from orchestrate.engines.base import Engine


MAX_SHOWN = 8  # jobs that an error lists


class Waits(UsageError):
    """A job waits in the queue, and has no files yet."""

    def __init__(self, job: str) -> None:
        """The job has this name."""
        super().__init__(f"{job} waits in the queue", f"python -m orchestrate stop {job} ends that")
        self.job = job


def job_folders(runs: Path, since: float = 0.0) -> list[Path]:
    """Return the run directories of this account's jobs, without clusters and those that ended before `since`."""
    return [paths.root for paths in _folders(runs) if not _ended_before(paths, since) and _is_job(paths)]


def _ended_before(paths: JobPaths, moment: float) -> bool:
    with contextlib.suppress(OSError):
        return paths.report.lstat().st_mtime < moment
    return False


def _folders(runs: Path) -> list[JobPaths]:
    """Return what is in the folder of jobs, which may not exist, in the order of names."""
    try:
        return [JobPaths(runs / name) for name in sorted(os.listdir(runs))]
    except OSError:
        return []


def _is_job(paths: JobPaths) -> bool:
    """Whether a folder is the run directory of a job of this account, and not of a cluster."""
    named = NAME.fullmatch(paths.root.name) and os.path.exists(paths.plan) and os.path.lexists(paths.spec)
    return bool(named) and not owners.foreign(paths.root) and not paths.nodes.exists()


def find(args: Args, engines: list[Engine]) -> Path:
    """Return the run directory of the job that `args.job` is the name or unique prefix of, running or ended.

    A job in another folder than `args.runs` is found only by its whole name.
    Raises UsageError for one that another user could have created or can change: its content cannot be trusted.
    """
    runs, found = _matches(args, engines)
    folder = runs[found[0]] if found else args.runs / args.job
    if why := owners.foreign(folder):
        raise UsageError(
            f"{folder} is not one of your run directories: {why}",
            owners.as_owner(folder, f"{args.command} {args.job}")
            or "name a job that you have started: python -m orchestrate ps --all",
        )
    if folder.parent != args.runs:
        owners.check(folder.parent)
    if not found and JobPaths(folder).nodes.is_dir():
        raise UsageError(f"{args.job} is a cluster, not a job", f"python -m orchestrate down {args.job} removes it")
    if waiting := [] if args.job in found else _waiting(args.job):
        if not found:
            raise Waits(waiting[0])
        raise UsageError(f"{args.job} matches {len(found) + len(waiting)} jobs", ", ".join([*found, *waiting]))
    if len(found) != 1:
        what = f"{args.job} matches {len(found)} jobs" if found else f"no such job: {args.job}"
        known = _newest(
            [JobPaths(runs[name]) for name in found or [name for name in runs if runs[name].parent == args.runs]]
        )
        more = f" and {len(known) - MAX_SHOWN} more" if len(known) > MAX_SHOWN else ""
        names = ", ".join(paths.root.name for paths in known[:MAX_SHOWN]) + more
        none = f"no jobs in {args.shown}; use --runs to select another folder, or the whole name"
        raise UsageError(what, f"jobs in {args.shown}: {names}" if known else none)
    return folder


def _matches(args: Args, engines: list[Engine]) -> tuple[dict[str, Path], list[str]]:
    """Return the run directories of all known jobs by name, and the names of those that `args.job` can mean."""
    states = [state for engine in engines for state in engine.jobs() if not state.cluster and state.named]
    running = {state.job_id: state.paths.root for state in states}
    runs = {folder.name: folder for folder in job_folders(args.runs)} | running
    here = [name for name in runs if runs[name].parent == args.runs or name == args.job]
    matches = [name for name in here if name.startswith(args.job)]
    matches = [name for name in matches if re.fullmatch("-[0-9a-f]{6}", name.removeprefix(args.job))] or matches
    ours = [name for name in matches if name in running or records.find(runs[name])]
    found = [args.job] if args.job in ours else [name for name in ours if name in running] or ours
    found = found or [name for name in matches if name == args.job]  # created on another machine or by another account
    elsewhere = [] if found else [run for run in records.runs(args.job) if not JobPaths(run).nodes.exists()]
    if len(elsewhere) == 1:
        return {args.job: elsewhere[0]}, [args.job]
    return runs, found


def _waiting(name: str) -> list[str]:
    """Return the jobs of this account in the queue whose names begin with this one; they have no files yet."""
    return [claim.job for claim in claims.waiting() if claim.job.startswith(name)]


def latest(runs: Path, queued: bool = False) -> str:
    """Return this account's newest job, with `queued` also one that waits; raises UsageError if there is none."""
    jobs = [paths for paths in _newest(_folders(runs)) if _is_job(paths)]
    ours = next((paths for paths in jobs if records.find(paths.root)), None)
    waiting = claims.waiting(runs)[-1:] if queued else []
    if waiting and (not ours or waiting[0].since > 1e9 * created_at(ours)):
        return waiting[0].job
    if ours:
        return ours.root.name
    if jobs:
        raise UsageError(f"the jobs in {runs} were created elsewhere", f"name one: {runs / jobs[0].root.name}")
    raise UsageError(f"no jobs in {runs}", "name a job of another folder, or select that with --runs")


def resolve_runs(args: Args) -> None:
    """Resolve `--runs`, and replace a run directory or `latest` given as the job by the job's name.

    Raises UsageError for a folder that cannot be used: for example, a link that may have come with a project.
    """
    if COMMANDS[args.command].writes and args.runs is None and RUNS.is_symlink():
        raise UsageError(f"{RUNS} is a symbolic link", "pass the folder that it points to: --runs DIR")
    args.shown, name = args.runs or RUNS, args.job
    if "/" in name:
        args.shown, args.job = Path(name).parent, Path(name).name
    starts = args.command in ("run", "up", "plan")
    args.runs = owners.check(args.shown, hint="" if starts else owners.as_owner(args.shown, f"{args.command} {name}"))
    if name == LATEST:
        args.job = latest(args.runs, queued=args.command == "stop")


def each(args: Args) -> Iterator[Args]:
    """Yield the arguments for each of the jobs that a command names."""
    yield args
    for name in args.others:
        other = args.of(name)
        other.runs = args.shown
        resolve_runs(other)
        yield other


def _newest(jobs: list[JobPaths]) -> list[JobPaths]:
    """Sort jobs by creation time, newest first."""
    return sorted(jobs, key=lambda paths: (created_at(paths), paths.root.name), reverse=True)


def created_at(paths: JobPaths) -> float:
    """Return the creation time of a job in seconds since 1970: its file is written once. 0 if unknown."""
    try:
        return paths.spec.lstat().st_mtime
    except OSError:
        return 0.0


def paths_of(args: Args) -> JobPaths:
    """Return the files of the job that `args.job` names; ask the engines only if `--runs` does not have it."""
    paths = JobPaths(args.runs / args.job)
    if _is_job(paths) and records.find(paths.root):
        return paths  # without a look at thousands of others
    return JobPaths(find(args, registry.available_engines()))


def anywhere(args: Args) -> tuple[JobPaths, list[Engine]]:
    """Return a job's files and all engines that answer; raises OrchestrateError if the job's own does not."""
    engines = registry.available_engines()
    paths = JobPaths(find(args, engines))
    with contextlib.suppress(UsageError):  # its files are unreadable
        spec, plan = run_dir.load(paths)
        if plan.engine not in {engine.name for engine in engines}:
            return paths, [registry.of_plan(spec, plan), *engines]
    return paths, engines
