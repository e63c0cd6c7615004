"""`logs`: the output of a job's workers."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import sys
import time
from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

from orchestrate import console, errors
from orchestrate.cli import display, find, options, waiting
from orchestrate.cli.args import Args
from orchestrate.cli.parser import Parser
from orchestrate.console import print_message
from orchestrate.errors import UsageError
from orchestrate.record import run_dir
from orchestrate.record.logs import Follower, Line
from orchestrate.record.paths import JobPaths
from orchestrate.record.times import Times
from orchestrate.show.format import Printer, Style

MAX_TAIL, LINE_SIZE = 64 << 20, 200  # bytes of all ranks that `--tail` keeps, of which each line takes some
SEARCH_SECONDS = 1.0  # for one line, which a job can make to take hours


class Timed(NamedTuple):
    """A line and when it was read, in seconds since 1970."""

    when: float
    line: Line


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `logs`."""
    options.add_job_name(parser, latest=True)
    options.add_runs(parser)
    options.add_ranks(parser)
    parser.add_argument("--merge", action="store_true", help="sort the lines of all ranks by time")
    parser.add_argument(
        "--since", type=options.duration, metavar="DURATION", help="print only lines of the last 5m, for example"
    )
    parser.add_argument(
        "--tail", type=options.count, metavar="N", help="print only the last N lines of each rank, and what follows"
    )
    parser.add_argument(
        "--grep", type=options.pattern, metavar="REGEX", help="print only lines that match this regular expression"
    )
    parser.add_argument("--rank", type=int, metavar="N", help="print only the output of this rank, without prefixes")
    options.add_follow(parser)


def run(args: Args) -> int:
    """Print the output of workers: all of it, or what the options select; with `--follow`, until the job ends."""
    paths = find.paths_of(args)
    spec, plan = run_dir.load_for_display(paths)
    if args.rank is not None:
        args.ranks = str(args.rank)
    wanted = display.ranks(args.ranks, len(plan.workers)) if args.ranks else range(len(plan.workers))
    style = Style(timestamps=args.timestamps, colors=console.colors(sys.stdout), prefixes=args.rank is None)
    printer, show = Printer(plan, style), partial(console.out, colored=True)
    followers = [Follower(paths, [rank], hide=spec.mask(), colors=style.colors) for rank in sorted(wanted)]
    times, tail = _times(args, paths, len(plan.workers)), args.tail
    if tail is not None and not args.grep:
        for follower in followers:
            follower.tail(min(tail, MAX_TAIL // LINE_SIZE))
    with waiting.detaching(paths.root.name) if args.follow else contextlib.nullcontext():
        for running in waiting.rounds(args, paths):
            for text in _texts(args, followers, printer, times, tail, end=not running):
                show(text)
            tail, times = None, Times()  # later lines are new
            if running:
                console.progress(printer.bar({r: bar for f in followers for r, bar in f.bars().items()}), show)
    if args.follow and not run_dir.ended(paths):
        run_dir.unsupervised(paths)
    elif all(follower.silent for follower in followers):
        print_message(f"no output of {f'rank {args.ranks}' if args.ranks else 'any rank'}")
    return errors.SUCCEEDED


def _texts(
    args: Args, followers: list[Follower], printer: Printer, times: Times, tail: int | None, end: bool
) -> Iterator[str]:
    """Yield what is to be printed of the new lines, or of the last `tail` ones of each rank."""
    by_line = args.grep or args.merge or args.timestamps or args.since is not None
    if tail is None and not by_line:  # much faster
        for follower in followers:
            yield from (printer.text([block.rank], block.colored) for block in follower.blocks(end=end))
        return
    streams = [_selected(follower, args, times, end) for follower in followers]
    if tail is not None:
        streams = [_last(stream, tail, MAX_TAIL // len(streams)) for stream in streams]
    for when, line in heapq.merge(*streams) if args.merge else itertools.chain(*streams):
        yield printer.text([line.rank], line.text, when)


def _last(stream: Iterator[Timed], lines: int, most: int) -> Iterator[Timed]:
    """Return the last lines of a rank, fewer if they take more than `most` bytes."""
    kept: deque[Timed] = deque()
    size = 0
    for one in stream:
        kept.append(one)
        size += LINE_SIZE + len(one.line.text)
        while len(kept) > lines or (size > most and len(kept) > 1):
            size -= LINE_SIZE + len(kept.popleft().line.text)
    return iter(kept)


def _times(args: Args, paths: JobPaths, ranks: int) -> Times:
    """Return when lines were written, if an option asks for that; raises UsageError if it is not known."""
    options = {"--since": args.since is not None, "--merge": args.merge, "--timestamps": args.timestamps}
    if not any(options.values()):
        return Times()
    times = Times(paths.times, ranks)
    if not times.notes and not args.follow and any(paths.log(rank).exists() for rank in range(ranks)):
        flag = next(name for name, given in options.items() if given)
        raise UsageError(f"{flag}: {paths.root.name} has no record of when its lines were written", "leave it out")
    return times


def _selected(follower: Follower, args: Args, times: Times, end: bool) -> Iterator[Timed]:
    """Yield the lines of a rank that the options select."""
    now, searches = time.time(), True
    since = 0.0 if args.since is None else now - args.since
    for line in follower.lines(end=end):
        try:
            if args.grep and not args.grep.search(console.clean(line.text), timeout=SEARCH_SECONDS):
                continue
        except TimeoutError:
            if searches:
                print_message(f"warning: a search in the output of rank {line.rank} took too long, and was given up")
            searches = False
            continue
        when = times.at(line.rank, line.offset) or now  # the last lines have not been noted yet
        if when >= since:
            yield Timed(when, line)
