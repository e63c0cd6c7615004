"""`report`: pages about jobs that have ended."""

from __future__ import annotations

from orchestrate import errors
from orchestrate.cli import find, options
from orchestrate.cli.args import Args
from orchestrate.cli.parser import Parser
from orchestrate.console import out
from orchestrate.files.paths import PAGE


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `report`."""
    options.add_job_name(parser, latest=True)
    options.add_runs(parser)
    parser.add_argument(
        "others", nargs="*", type=options.job, metavar="OTHER", help="jobs to compare it with, in RUNS/report.html"
    )


def run(args: Args) -> int:
    """Write the page of a job to its run directory, or a comparison of several jobs next to it; print its path."""
    from orchestrate.pages.page import write  # only here: it takes time to import

    jobs = [find.paths_of(each) for each in find.each(args)]
    jobs = [*{paths.root: paths for paths in jobs}.values()]
    page = jobs[0].page if len(jobs) == 1 else args.runs / PAGE
    write(jobs, page)
    out(str(args.shown / page.relative_to(args.runs)))
    return errors.SUCCEEDED
