"""How `run`, `attach` and `resume` show a job: its messages, the output of its workers, and a picture of it."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import sys
from collections.abc import Iterator
from functools import partial

from orchestrate import console
from orchestrate.console import print_message, stream
from orchestrate.errors import ResourceError, UsageError
from orchestrate.files.paths import JobPaths
from orchestrate.job.events import Event, to_line
from orchestrate.job.plan import Plan
from orchestrate.view.folded import PlainScreen
from orchestrate.view.printer import Style
from orchestrate.view.screen import Screen, Shown

RANKS = re.compile(r"(\d{1,7})(?:-(\d{1,7}))?")
STOPS = "Ctrl-C stops the job; closing the terminal does not"
IMPORTANT = ("warning:", "error:", "hint:")  # how messages begin that are also printed with --quiet


class JsonScreen(Screen):
    """Prints events to stdout, one JSON object per line."""

    def event(self, event: Event) -> None:
        """Take an event."""
        stream(json.dumps(to_line(event)))


def quiet(args: argparse.Namespace) -> bool:
    """Whether only warnings and the result are printed."""
    return bool(args.quiet) or args.progress == "quiet"


@contextlib.contextmanager
def shown(args: argparse.Namespace, plan: Plan, paths: JobPaths, keys: str = STOPS) -> Iterator[Shown]:
    """Show a job during a `with` block, as the options of the command say; raises OrchestrateError.

    `keys` describes what Ctrl-C does.
    """
    style = style_of(args, plan)
    if quiet(args):
        yield Shown(_important, lambda line: None, style, Screen())
        return
    output = print_message if args.print_path or args.json else partial(stream, colored=style.colors)
    with _screen(args, plan, paths, keys) as screen:
        yield Shown(print_message, output, style, screen)


def style_of(args: argparse.Namespace, plan: Plan) -> Style:
    """Return how the options say that lines are printed; raises UsageError for ranks that do not exist."""
    reserved = args.print_path or args.json
    return Style(
        ranks=ranks(args.ranks, len(plan.workers)) if args.ranks else None,
        timestamps=args.timestamps,
        colors=not reserved and args.progress != "json" and console.colors(sys.stdout),
        as_json=args.progress == "json",
    )


def _important(message: str) -> None:
    if message.startswith(IMPORTANT):
        print_message(message)


def _screen(
    args: argparse.Namespace, plan: Plan, paths: JobPaths, keys: str
) -> contextlib.AbstractContextManager[Screen]:
    """Return the live view on a terminal, unless `--progress` says otherwise."""
    if args.progress == "json":
        return contextlib.nullcontext(JsonScreen())
    if args.progress == "plain" or (args.progress == "auto" and not console.replaces(sys.stderr)):
        return contextlib.nullcontext(PlainScreen(plan, paths))
    try:
        from orchestrate.view.live import shown as live  # only here: it imports rich
    except ImportError:
        if args.progress == "tty":
            raise ResourceError("--progress tty needs the package rich", "pip install rich") from None
        return contextlib.nullcontext(PlainScreen(plan, paths))
    return live(plan, paths, keys)


def ranks(text: str, workers: int) -> frozenset[int]:
    """Parse `0,3,8-15`; raises UsageError, also for a rank that none of the workers has."""
    found: set[int] = set()
    for part in text.split(","):
        if not (match := RANKS.fullmatch(part.strip())) or int(match[2] or match[1]) < int(match[1]):
            raise UsageError(f"--ranks {text}: expected ranks such as 0,3 or 0-7", "python -m orchestrate logs --help")
        last = int(match[2] or match[1])
        if last >= workers:
            raise UsageError(f"there is no rank {last}", f"ranks are 0 to {workers - 1}")
        found.update(range(int(match[1]), last + 1))
    return frozenset(found)
