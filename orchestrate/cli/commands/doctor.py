"""`doctor`: problems that keep jobs from running."""

from __future__ import annotations

import json
from collections.abc import Iterator

from orchestrate import console, errors
from orchestrate.cli import options, request, signals
from orchestrate.cli.args import Args
from orchestrate.cli.parser import Parser
from orchestrate.console import out
from orchestrate.dataclass import replace
from orchestrate.doctor.findings import BAD, GOOD, Finding
from orchestrate.engines import check_cache
from orchestrate.errors import OrchestrateError
from orchestrate.host import slurm
from orchestrate.spec.spec import JobSpec


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `doctor`."""
    parser.description = (
        "Report problems that keep jobs from running on this engine, on the hosts of its Swarm, or on a cluster."
    )
    parser.add_argument("--quick", action="store_true", help="do not run a job of two nodes and ten steps")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    options.add_job_options(parser)


def run(args: Args) -> int:
    """Print problems that keep the job of a command line from running; return the exit code of the first error."""
    signals.interruptible()
    return examine(request.spec_of(args), job=not args.quick, as_json=args.json)


def examine(spec: JobSpec, job: bool = False, as_json: bool = False) -> int:
    """Print problems that keep a job from running, with `job` also those of a real one; return the exit code."""
    check_cache.forget()  # what keeps GPUs from being used may have been fixed
    found: list[Finding] = []
    try:
        for finding in _findings(spec, job):
            finding = replace(finding, hint=finding.hint.replace(f"{console.MODULE} ", f"{console.called()} "))
            found.append(finding)
            if not as_json:
                out(f"{finding.state:<7}  {finding.what}")
                if finding.hint:
                    out(f"         hint: {finding.hint}")
            console.flush()
    except OrchestrateError as error:
        if not as_json:
            raise
        found.append(Finding(BAD, str(error), error.hint, error.exit_code))
    if as_json:
        out(json.dumps([{"state": one.state, "what": one.what, "hint": one.hint} for one in found], indent=2))
    return next((one.code for one in found if one.state == BAD), errors.SUCCEEDED)


def _findings(spec: JobSpec, job: bool) -> Iterator[Finding]:
    """Yield what the checks of the job's engine find, and unless something is wrong with it, what a job finds."""
    if spec.engine == "process":
        from orchestrate.doctor import machine, trial  # only here: they take time to import

        yield from machine.local()
        if job and machine.torch_version():
            yield from trial.trial(spec)
        if slurm.installed():
            yield Finding(GOOD, "Slurm is installed here", f"{console.MODULE} doctor --engine slurm checks its cluster")
        return
    if spec.engine == "slurm":
        from orchestrate.doctor import slurm as cluster

        yield from cluster.doctor(spec)
        return
    from orchestrate.doctor import checks

    yield from checks.doctor(spec, job)
