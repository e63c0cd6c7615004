"""`resume`: another generation of a job that has ended."""

from __future__ import annotations

import argparse
from typing import NoReturn

from orchestrate.api import prepare, resume
from orchestrate.cli import display, find, options, result, signals
from orchestrate.cli.args import Args
from orchestrate.cli.parser import Parser
from orchestrate.console import print_message, quoted
from orchestrate.errors import UsageError
from orchestrate.record.logs import rest
from orchestrate.show.feed import Feed
from orchestrate.supervise import launch


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `resume`."""
    options.add_job_name(parser, latest=True)
    options.add_runs(parser)
    options.add_stdout_options(parser)
    options.add_detach(parser)
    parser.add_argument("--queue", action="store_true", help="wait until enough GPUs are free, in order of arrival")
    parser.add_argument("--set", type=_refuse, help=argparse.SUPPRESS)


def _refuse(setting: str) -> NoReturn:
    """Raise UsageError for a setting, which a job that is resumed cannot change."""
    raise UsageError(
        f"resume: {quoted(setting)} cannot be set: a job is resumed with the settings that it was started with",
        "start a new job, whose script can load the checkpoints of this one",
    )


def run(args: Args) -> int:
    """Continue a job that was stopped, failed or was lost, and return its exit code.

    Its code folder is copied again, except for files that workers wrote.
    """
    with result.prepared(args):
        return _resume(args)


def _resume(args: Args) -> int:
    signals.interruptible()
    paths = find.paths_of(args)
    display.style_of(args, resume.check(paths))  # its options may be wrong
    job = resume.resume(paths, wait=args.queue)
    if not options.quiet(args):
        print_message(str(job.plan))
        if job.plan.engine == "process":
            print_message("workers get the variables of this shell, and those of -e as before")
    if args.detach or job.plan.engine == "slurm":
        with job.claim:
            prepare.hand_over(job)
        if args.detach:
            return result.detached(args, paths)
        from orchestrate.cli.commands import attach  # only here: it takes time to import

        return attach.until_end(args, paths)
    follower, stops = rest(paths, job.spec, job.plan, last=0), signals.count(job.spec)
    with job.claim, display.shown(args, job.plan, paths) as shown:
        feed = Feed(paths, job.spec, job.plan, shown, follower)
        data = launch.supervise(paths, job.engine, stops, feed)
    return result.show(args, paths.root.name, data)
