"""`wait`: until a job ends."""

from __future__ import annotations

from orchestrate.cli import find, options, result, waiting
from orchestrate.cli.args import Args
from orchestrate.cli.parser import Parser
from orchestrate.record import lock, run_dir


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `wait`."""
    options.add_job_name(parser, latest=True)
    options.add_runs(parser)


def run(args: Args) -> int:
    """Wait until a job ends, and return its exit code."""
    paths = find.paths_of(args)
    with waiting.detaching(paths.root.name):
        while not (data := run_dir.ended(paths)):
            if not lock.supervisor(paths) and not run_dir.ended(paths):
                run_dir.unsupervised(paths)
            args.clock.sleep(0.1)
    return result.exit_code(data)
