"""`rm`: the removal of jobs that have ended."""

from __future__ import annotations

import contextlib
import os

from orchestrate import errors
from orchestrate.api import removal
from orchestrate.cli import find, options
from orchestrate.cli.args import Args
from orchestrate.cli.parser import Parser
from orchestrate.console import print_message
from orchestrate.errors import UsageError
from orchestrate.host import records
from orchestrate.record import lock, run_dir
from orchestrate.record.slurm_job import Batch


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `rm`."""
    options.add_job_name(parser, latest=False)
    options.add_runs(parser)
    options.add_dry_run(parser)
    parser.add_argument("others", nargs="*", default=[], type=options.job, metavar="OTHER", help="jobs to remove, too")


def run(args: Args) -> int:
    """Remove jobs in the order given, up to the first that cannot be removed."""
    for each in find.each(args):
        _remove(each)
    return errors.SUCCEEDED


def _remove(args: Args) -> None:
    """Remove a job's files and resources; for a run directory without a record, only the files."""
    paths, engines = find.anywhere(args)
    name = paths.root.name
    ours = not os.path.lexists(paths.root) or records.find(paths.root)
    resources = removal.resources(engines, name) if ours else []
    if supervisor := lock.supervisor(paths):
        raise _in_use(name, supervisor)
    if ours and paths.cluster:
        hint = f"python -m orchestrate stop {name}, or down {paths.cluster}"
        raise UsageError(f"{name} may still be running on a cluster", hint)
    if args.dry_run:
        removal.show(resources, f"folder {paths.root}")
        return
    with contextlib.ExitStack() as held:
        if ours and paths.root.is_dir():
            try:
                held.enter_context(lock.held(paths, supervises=False))  # so that no supervisor takes it over meanwhile
            except BlockingIOError:
                raise _in_use(name) from None
            except OSError:  # a full disk, for example
                pass
        if ours:
            removal.remove(paths, resources)
        run_dir.remove(paths)
    print_message(f"{name} removed")


def _in_use(name: str, by: lock.Supervisor | Batch = lock.OTHER) -> UsageError:
    if isinstance(by, lock.Supervisor) and not by.pid:
        return UsageError(f"{name} is in use by {by}", f"once that has ended: python -m orchestrate rm {name}")
    return UsageError(f"{name} is running, supervised by {by}", f"python -m orchestrate stop {name}")
