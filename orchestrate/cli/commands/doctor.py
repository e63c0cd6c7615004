"""`doctor`: problems that keep jobs from running."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING

from orchestrate import console, errors
from orchestrate.cli import options, request
from orchestrate.cli.parser import Parser
from orchestrate.console import out
from orchestrate.engines import check_cache
from orchestrate.engines.choice import sdk
from orchestrate.spec.spec import JobSpec

if TYPE_CHECKING:
    from orchestrate.doctor.findings import Finding


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `doctor`."""
    parser.description = (
        "Report problems that keep jobs from running on this engine, on the hosts of its Swarm, or on a cluster."
    )
    options.add_job_options(parser)


def run(args: argparse.Namespace) -> int:
    """Print problems that keep the job of a command line from running; return the exit code of the first error."""
    return examine(request.spec_of(args))


def examine(spec: JobSpec) -> int:
    """Print problems that keep a job from running; return the exit code of the first error."""
    from orchestrate.doctor import findings  # only here: its XML parser takes milliseconds to import

    check_cache.forget()  # what keeps GPUs from being used may have been fixed
    code = errors.SUCCEEDED
    for finding in _findings(spec):
        out(f"{finding.state:<7}  {finding.what}")
        if finding.hint:
            out(f"         hint: {finding.hint}")
        console.flush()
        if finding.state == findings.BAD:
            code = code or finding.code
    return code


def _findings(spec: JobSpec) -> Iterator[Finding]:
    """Yield what the checks of the job's engine find."""
    if spec.engine == "process":
        from orchestrate.doctor.findings import local

        yield from local()
        return
    if spec.engine == "slurm":
        from orchestrate.doctor import slurm

        yield from slurm.doctor(spec)
        return
    with sdk():
        from orchestrate.doctor import checks
    yield from checks.doctor(spec)
