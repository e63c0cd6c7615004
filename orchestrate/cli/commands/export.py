"""`export`: a job as a file for Kubernetes, Slurm, PBS or Compose."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable

from orchestrate import console, errors
from orchestrate.cli import options, request
from orchestrate.cli.args import Args
from orchestrate.cli.parser import EXPORTS, Parser
from orchestrate.console import quoted
from orchestrate.errors import UsageError
from orchestrate.record import run_dir


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `export`."""
    parser.description = "Print the job as a file for Kubernetes, Slurm, PBS or Docker Compose."
    parser.usage = f"%(prog)s {'|'.join(EXPORTS)} [JOB.yaml] [options] {options.COMMAND}"
    targets = parser.add_subparsers(
        dest="target", metavar="|".join(EXPORTS), required=True, prog=parser.prog, parser_class=Parser
    )
    for (target, forms), name in zip(EXPORTS.items(), ("Kubernetes", "Slurm", "PBS", "Docker Compose")):
        command = targets.add_parser(
            target,
            help=f"--form {'|'.join(forms)}" if forms else "a Compose file",
            description=f"Print the job as a file for {name}.",
            usage=f"%(prog)s [JOB.yaml] [options] {options.COMMAND}",
        )
        command.add_argument(
            "--form",
            metavar="|".join(forms),
            help=f"kind of output: {', '.join(forms)} (default: {forms[0]})" if forms else argparse.SUPPRESS,
        )
        options.add_job_options(command)


def run(args: Args) -> int:
    """Print a job as a file for another system."""
    forms = EXPORTS[args.target] or ("",)
    form = args.form or forms[0]
    if form not in forms:
        hint = f"choose from {', '.join(forms)}" if forms[0] else "compose has no forms: remove --form"
        raise UsageError(f"unknown form {quoted(form)}", hint)
    spec = request.spec_of(args)
    name = run_dir.slug(spec)
    module = importlib.import_module(f"orchestrate.export.{args.target}")
    write: Callable[..., str] = getattr(module, args.target)
    console.copy(write(spec, name, form) if form else write(spec, name))
    return errors.SUCCEEDED
