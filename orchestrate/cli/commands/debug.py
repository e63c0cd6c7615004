"""`debug`: Python's debugger in a worker of a running job."""

from __future__ import annotations

from pathlib import Path

from orchestrate.cli import find, options
from orchestrate.cli.args import Args
from orchestrate.cli.commands import exec as execution
from orchestrate.cli.parser import Parser
from orchestrate.files.paths import PACKAGE
from orchestrate.plan import container
from orchestrate.record import debugging, run_dir


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `debug`."""
    options.add_job_name(parser, latest=True)
    options.add_runs(parser)
    parser.add_argument("--rank", type=int, default=0, metavar="N", help="debug this worker (default: 0)")


def run(args: Args) -> int:
    """Debug a worker until the debugger is left, after which the worker goes on; return 0, or 1 if it cannot be."""
    paths = find.paths_of(args)
    _, plan = run_dir.load(paths)
    folder = Path(container.PROGRAM) if plan.contained else Path(PACKAGE, "node")
    command = [plan.placement.python, "-I", str(folder / "programs" / "debugger.py"), plan.job_id, str(args.rank)]
    args.node = None
    with debugging.held(paths):  # without a terminal in a container, which would outlive this one
        return execution.beside(args, command, terminal=False)
