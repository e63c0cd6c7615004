"""`run`: a job, from its request to its end."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import IO

from orchestrate import console, errors
from orchestrate.api import prepare
from orchestrate.cli import display, options, request, result, signals
from orchestrate.cli.args import Args
from orchestrate.cli.arguments import flags
from orchestrate.cli.parser import Parser
from orchestrate.console import out, print_message
from orchestrate.errors import OrchestrateError, UsageError
from orchestrate.files.paths import PROJECT, STDIN
from orchestrate.record import run_dir
from orchestrate.record.paths import JobPaths
from orchestrate.show.feed import Feed
from orchestrate.spec.spec import APP, JobSpec
from orchestrate.supervise import launch


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `run`."""
    options.add_job_options(parser)
    parser.add_argument("--dry-run", action="store_true", help="print the plan without creating anything")
    options.add_stdout_options(parser)
    parser.add_argument(
        "--resume", type=options.job, dest="job", metavar="JOB", help="continue this job, as `resume` does"
    )
    options.add_detach(parser)
    options.add_runs(parser)


def run(args: Args) -> int:
    """Run a job until it ends, in this process or in the background; return its exit code."""
    if args.job:
        if args.script is not None or args.file or args.set or args.dry_run or flags(args):
            raise UsageError("--resume uses the script and the settings of the job", "remove all other options")
        from orchestrate.cli.commands import resume  # only here: it takes time to import

        return resume.run(args)
    if args.dry_run:
        return show_plan(args)
    with result.prepared(args):
        return _start(args)


def show_plan(args: Args) -> int:
    """Print the plan of a job without creating anything, and return the exit code."""
    spec = request.spec_of(args)
    job_plan = prepare.planned(spec, args.runs)
    _tell_of_example(args, spec)
    as_json = args.json
    out(job_plan.to_json(spec.mask()) if as_json else job_plan)
    if job_plan.engine == "slurm" and not as_json:
        from orchestrate.engines.slurm.batch_script import script  # only here: it takes time to import

        out(f"\n{spec.mask()(script(spec, JobPaths(args.runs / job_plan.job_id)))}".rstrip())
    return errors.SUCCEEDED


def _start(args: Args) -> int:
    """Prepare, plan and launch a job, and return the exit code."""
    began = args.clock.monotonic()
    signals.interruptible()
    spec = request.spec_of(args)
    stdin = _read_stdin() if spec.stdin else None
    job = prepare.prepare(spec, args.runs)
    _tell_of_example(args, spec)
    display.style_of(args, job.plan)  # before there is a job: its options may be wrong
    on_slurm = job.plan.engine == "slurm"  # whose queue outlives this command
    stops = signals.count(spec) if not (args.detach or on_slurm) else lambda: 0
    with job.claim:
        job.create({STDIN: stdin} if stdin else {})
        if not options.quiet(args):
            print_message(str(job.plan))
        if args.detach or on_slurm:
            try:
                prepare.hand_over(job)
            except OrchestrateError:
                if on_slurm:  # which has refused it
                    run_dir.remove(job.paths)
                raise
        if args.detach:
            return result.detached(args, job.paths)
        if on_slurm:
            from orchestrate.cli.commands import attach  # only here: it takes time to import

            return attach.until_end(args, job.paths)
        with display.shown(args, job.plan, job.paths) as shown:
            feed = Feed(job.paths, spec, job.plan, shown)
            data = launch.supervise(job.paths, job.engine, stops, feed, prepared=args.clock.monotonic() - began)
    return result.show(args, job.paths.root.name, data)


def _tell_of_example(args: Args, spec: JobSpec) -> None:
    if args.script is None and not args.file and spec.command == APP and Path.cwd() != PROJECT:
        print_message(f"no script given: this is the example, {APP[1]}; yours: {args.command} SCRIPT.py")


@console.during("reading standard input")
def _read_stdin() -> IO[bytes]:
    """Read our standard input to its end, into a temporary file: a job exists only once it is complete."""
    if sys.stdin is None:
        raise UsageError("standard input is closed", "remove --stdin, or use < FILE")
    file = tempfile.TemporaryFile()  # noqa: SIM115 (`Prepared.create` closes it)
    shutil.copyfileobj(sys.stdin.buffer, file)
    file.seek(0)
    return file
