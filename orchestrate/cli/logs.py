"""`logs`: the output of a job's workers."""

from __future__ import annotations

import argparse
import re
from collections import deque
from collections.abc import Iterable, Iterator

from orchestrate import console, errors
from orchestrate.cli import commands
from orchestrate.console import out, print_message
from orchestrate.errors import UsageError
from orchestrate.job import store
from orchestrate.job.logs import Follower
from orchestrate.supervise import launch

RANKS = re.compile(r"(\d{1,7})(?:-(\d{1,7}))?")


def show_logs(args: argparse.Namespace) -> int:
    """Print the output of workers: all of it, or what the options select; with `--follow`, until the job ends."""
    paths = commands.paths_of(args)
    spec, plan = store.look(paths)
    prefixes = launch.prefixes(plan)
    wanted = {args.rank} if args.rank is not None else _ranks(args.ranks) if args.ranks else prefixes.keys()
    if unknown := sorted(wanted - prefixes.keys()):
        raise UsageError(f"no rank {unknown[0]} in {paths.root.name}", f"its ranks are 0 to {len(prefixes) - 1}")
    followers = [
        Follower(paths, {rank: prefixes[rank] if args.rank is None else ""}, hide=spec.mask())
        for rank in sorted(wanted)
    ]
    tail = args.tail
    with commands.watching(paths.root.name):
        for running in commands.rounds(args, paths):
            for follower in followers:
                for line in _selected(follower.lines(end=not running), args.grep, tail):
                    out(line)
            tail = None  # later lines are new
            if running:
                console.progress(next(filter(None, (follower.progress() for follower in followers)), ""), out)
    if args.follow and not store.ended(paths):
        commands.unsupervised(paths)
    elif all(follower.silent for follower in followers):
        print_message(f"no output of {'any rank' if args.rank is None else f'rank {args.rank}'}")
    return errors.SUCCEEDED


def _selected(lines: Iterable[str], grep: re.Pattern[str] | None, tail: int | None) -> Iterable[str]:
    found: Iterator[str] = (line for line in lines if grep is None or grep.search(line))
    return found if tail is None else deque(found, maxlen=tail)


def _ranks(text: str) -> set[int]:
    """Parse `0,3,8-15`; raises UsageError."""
    found: set[int] = set()
    for part in text.split(","):
        if not (match := RANKS.fullmatch(part.strip())) or int(match[2] or match[1]) < int(match[1]):
            raise UsageError(f"--ranks {text}: expected ranks such as 0,3 or 0-7", "python -m orchestrate logs --help")
        found.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return found
