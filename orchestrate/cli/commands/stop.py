"""`stop`: the end of a job, also of one without a supervisor."""

from __future__ import annotations

import argparse
import os

from orchestrate import errors
from orchestrate.api import removal, stop
from orchestrate.cli import find, options, signals
from orchestrate.cli.parser import Parser
from orchestrate.console import print_message
from orchestrate.host import records


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `stop`."""
    options.add_job_name(parser, latest=False)
    options.add_runs(parser)
    options.add_dry_run(parser)


def run(args: argparse.Namespace) -> int:
    """Stop a job, and verify that nothing of it is left."""
    paths, engines = find.anywhere(args)
    name = paths.root.name
    if os.path.lexists(paths.root):
        records.need(paths.root)
    if args.dry_run:
        return removal.show(removal.resources(engines, name))
    stopped = stop.stop(paths, engines, args.clock, signals.count)
    print_message(f"{name} stopped" if stopped else f"{name} has already ended")
    return errors.SUCCEEDED
