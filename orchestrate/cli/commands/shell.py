"""`shell`: a shell beside a worker, with its environment and working directory."""

from __future__ import annotations

import sys

from orchestrate.cli import options
from orchestrate.cli.args import Args
from orchestrate.cli.commands import exec as execution
from orchestrate.cli.parser import Parser

SHELL = ("sh", "-c", 'exec "$(command -v bash || command -v sh)"')


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `shell`."""
    options.add_job_name(parser, latest=True)
    options.add_runs(parser)
    execution.add_node(parser.add_mutually_exclusive_group())


def run(args: Args) -> int:
    """Start a shell beside a worker, and return its exit code."""
    return execution.beside(args, SHELL, terminal=sys.stdin.isatty())
