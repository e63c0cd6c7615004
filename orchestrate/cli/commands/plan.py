"""`plan`: the rank assignment of a job."""

from __future__ import annotations

from orchestrate.cli import options
from orchestrate.cli.args import Args
from orchestrate.cli.commands.run import show_plan
from orchestrate.cli.parser import Parser


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `plan`."""
    options.add_job_options(parser)
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    options.add_runs(parser)


def run(args: Args) -> int:
    """Print the plan of a job, and create nothing."""
    return show_plan(args)
