"""`prune`: remove the files of jobs that have ended, and caches."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from orchestrate import errors
from orchestrate.cli import options
from orchestrate.cli.args import Args
from orchestrate.cli.find import job_folders
from orchestrate.cli.listing import ended_at
from orchestrate.cli.parser import Parser
from orchestrate.console import out, print_message
from orchestrate.files import folder as folders
from orchestrate.host import owners, records
from orchestrate.plan.plan import pluralize
from orchestrate.record import lock, run_dir
from orchestrate.record.paths import JobPaths
from orchestrate.spec.folders import data_folders
from orchestrate.spec.sizes import format_bytes

MAX_NAMES = 32 << 20  # bytes that paths of folders take in memory
CACHES = ("data", "environments", "sources")


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `prune`."""
    parser.description = (
        "Remove the run directories of jobs that ended long ago, and caches of packages, data and sources."
    )
    parser.add_argument(
        "--older-than",
        type=options.duration,
        default="30d",
        metavar="DURATION",
        help="time since their end (default: 30d)",
    )
    parser.add_argument("--caches", action="store_true", help="also remove the caches, which jobs fill again")
    options.add_dry_run(parser)
    options.add_runs(parser)


def run(args: Args) -> int:
    """Remove run directories of jobs that ended long ago, and with `--caches` the caches; print what is removed."""
    count = size = 0
    for folder, remove in [*_jobs(args), *(_caches() if args.caches else ())]:
        bytes_of = _size(folder)
        if args.dry_run or remove():
            count, size = count + 1, size + bytes_of
            out(folder)
    verb = "would be removed" if args.dry_run else "removed"
    print_message(f"{pluralize(count, 'folder')} {verb}: {format_bytes(size)}")
    return errors.SUCCEEDED


def _jobs(args: Args) -> Iterator[tuple[Path, Callable[[], bool]]]:
    """Yield this account's jobs that ended before the time and left no nodes."""
    before = time.time() - args.older_than
    for folder in job_folders(args.runs):
        paths = JobPaths(folder)
        data = run_dir.ended(paths) if records.find(folder) else None
        if data and not data["left_behind"] and ended_at(paths) <= before:
            yield folder, partial(_remove, paths)


def _remove(paths: JobPaths) -> bool:
    """Remove a job; return False if it has been resumed meanwhile."""
    try:
        with lock.held(paths, supervises=False):
            if run_dir.ended(paths):
                run_dir.remove(paths)
                return True
    except BlockingIOError:
        pass
    return False


def _caches() -> Iterator[tuple[Path, Callable[[], bool]]]:
    """Yield what is cached, except what a job of this account uses that has not ended."""
    using = _used()
    for kind in CACHES:
        folder = owners.cache(kind)
        for cached in sorted(filter(Path.is_dir, folder.iterdir())) if folder.is_dir() else ():
            if user := next((user for path, user in using.items() if path.is_relative_to(cached)), None):
                print_message(f"{cached} is kept: job {user} has not ended")
            else:
                yield cached, partial(_discard, cached)


def _discard(cached: Path) -> bool:
    """Remove a cache; return False if a job is filling it."""
    beside = cached.with_name(f"{cached.name}.lock")
    with open(beside if beside.exists() else cached / "lock", "a") as lock_file:
        try:
            fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print_message(f"{cached} is kept: a job is filling it")
            return False
        folders.remove(cached)
        beside.unlink(missing_ok=True)
    return True


def _used() -> dict[Path, str]:
    """Return the folders and files that jobs use which have not ended, and the names of these."""
    found: dict[Path, str] = {}
    for run in records.runs():
        paths = JobPaths(run)
        with contextlib.suppress(errors.OrchestrateError):  # its files are damaged
            if not run_dir.ended(paths):
                spec, plan = run_dir.load(paths)
                used = [*data_folders(spec).values(), plan.placement.code, plan.placement.python]
                found |= {Path(path): run.name for path in used}
    return found


def _size(folder: Path) -> int:
    """Return the bytes that a folder takes on its disk, of a part of it if the paths of its folders are too long."""
    size, names, pending = 0, 0, [str(folder)]
    while pending:
        with contextlib.suppress(OSError), os.scandir(pending.pop()) as entries:  # it was removed meanwhile
            for entry in entries:
                size += entry.stat(follow_symlinks=False).st_blocks * 512
                if entry.is_dir(follow_symlinks=False) and names < MAX_NAMES:
                    names += sys.getsizeof(entry.path)
                    pending.append(entry.path)
    return size
