"""`stop`: the end of jobs, also of those without a supervisor."""

from __future__ import annotations

import os
import signal

from orchestrate import errors
from orchestrate.api import cluster, removal, stop
from orchestrate.cli import find, listing, options, signals
from orchestrate.cli.args import Args
from orchestrate.cli.parser import Parser
from orchestrate.clock import wait_until
from orchestrate.console import out, print_message
from orchestrate.engines import registry
from orchestrate.host import claims, records
from orchestrate.record.paths import JobPaths

LEFT_TIMEOUT = 10.0  # seconds in which a process must have left the queue


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `stop`."""
    options.add_job_name(parser, latest=False, needed=False)
    parser.add_argument(
        "--all", action="store_true", help="stop all jobs in --runs, also in the queue, and nodes of killed programs"
    )
    options.add_runs(parser)
    options.add_dry_run(parser)


def run(args: Args) -> int:
    """Stop jobs, and verify that nothing of them is left."""
    if args.all == bool(args.job):
        raise errors.UsageError("name one job, or use --all", "python -m orchestrate ps; latest is the newest")
    if not args.all:
        return _stop(args)
    failure: errors.OrchestrateError | None = None
    waiting = [claim.job for claim in claims.waiting(args.runs)]
    rows = [row for row in listing.current(args.runs) if row.run and row.run.parent == args.runs]
    for name in [*waiting, *(row.name for row in rows if row.run and not JobPaths(row.run).nodes.is_dir())]:
        try:
            _stop(args.of(name))
        except errors.OrchestrateError as error:  # the others are stopped all the same
            if failure:
                print_message(f"error: {failure}")
            failure = error
    if failure:
        raise failure
    for each in cluster.found(args.runs):
        if each.orphaned:
            _remove(each, args.dry_run)
    return errors.SUCCEEDED


def _remove(left: cluster.Cluster, dry_run: bool) -> None:
    """Remove the nodes that a program was killed without removing, such as pytest."""
    engine = registry.of_plan(left.spec, left.plan)
    if dry_run:
        removal.show(removal.resources([engine], left.name), f"folder {left.paths.root}")
    else:
        cluster.remove_left(engine, left)


def _stop(args: Args) -> int:
    try:
        paths, engines = find.anywhere(args)
    except find.Waits as waits:
        return _stop_waiting(waits, args)
    name = paths.root.name
    if os.path.lexists(paths.root):
        records.need(paths.root)
    if args.dry_run:
        return removal.show(removal.resources(engines, name))
    stopped = stop.stop(paths, engines, args.clock, signals.count)
    print_message(f"{name} stopped" if stopped else f"{name} has already ended")
    return errors.SUCCEEDED


def _stop_waiting(waits: find.Waits, args: Args) -> int:
    """End the process that waits in the queue for a job; raises UsageError if the kernel does not say which it is."""
    if not (pid := claims.process(waits.job)):
        waits.hint = "press Ctrl-C in its shell"
        raise waits
    if args.dry_run:
        out(f"process {pid}")
        return errors.SUCCEEDED
    os.kill(pid, signal.SIGTERM)  # shells let a command in the background ignore SIGINT
    if not wait_until(lambda: not claims.process(waits.job), LEFT_TIMEOUT, args.clock):
        raise errors.UsageError(f"{waits.job} still waits in the queue", f"kill {pid} ends its process")
    print_message(f"{waits.job} stopped")
    return errors.SUCCEEDED
