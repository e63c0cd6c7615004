"""How `run`, `attach` and `resume` show a job: its messages, the output of its workers, and a picture of it."""

from __future__ import annotations

import contextlib
import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from orchestrate import console
from orchestrate.cli.args import Args
from orchestrate.cli.options import quiet
from orchestrate.clock import SYSTEM, Clock
from orchestrate.console import print_message, stream
from orchestrate.errors import UsageError
from orchestrate.plan.plan import Plan
from orchestrate.record import run_dir
from orchestrate.record.events import OURS, Event, to_line
from orchestrate.record.paths import JobPaths
from orchestrate.record.progress import Progress
from orchestrate.show.format import Style
from orchestrate.show.screen import Display, Screen
from orchestrate.show.state import seconds_left
from orchestrate.show.tracking import PlainScreen, TrackingScreen
from orchestrate.spec.redact import Mask

JSON_INTERVAL = 1.0  # seconds between two lines about the progress
RANKS = re.compile(r"(\d{1,7})(?:-(\d{1,7}))?")
STOPS = "Ctrl-C stops the job; closing the terminal does not"
IMPORTANT = ("warning:", "error:", "hint:")  # how messages begin that are also printed with --quiet


class JsonScreen(TrackingScreen):
    """Prints events and progress to stdout, one JSON object per line."""

    def __init__(self, plan: Plan, paths: JobPaths, mask: Mask, clock: Clock = SYSTEM) -> None:
        """`mask` hides secrets."""
        super().__init__(plan, paths, mask, clock)
        self.mask = mask
        self.printed: Progress | None = None
        self.due = 0.0  # when progress may be printed again

    def event(self, event: Event) -> None:
        """Record an event."""
        super().event(event)
        stream(json.dumps(self.mask.inside(to_line(event), ours=OURS)))

    def refresh(self, bars: Callable[[], Mapping[int, Progress | None]]) -> None:
        """Print the progress, if it is time and it has changed."""
        if self.clock.monotonic() < self.due:
            return
        self.catch_up(bars())
        with self.lock:
            found, left = self.view.lead.progress, seconds_left(self.view.lead, self.clock.monotonic())
        if found != self.printed and (found.step is not None or found.metrics):
            self.printed, self.due = found, self.clock.monotonic() + JSON_INTERVAL
            metrics = {name: value for name, value in found.metrics.items() if math.isfinite(value)}
            steps = {"step": found.step, "total_steps": found.total, "seconds_left": left}
            of_job = self.view.lead.steps and not found.bar  # none of an epoch
            row = {**(steps if of_job else dict.fromkeys(steps)), "metrics": metrics}
            stream(json.dumps({"progress": row, "time": round(self.clock.time(), 3)}))


@contextlib.contextmanager
def shown(args: Args, plan: Plan, paths: JobPaths, keys: str = STOPS) -> Iterator[Display]:
    """Show a job during a `with` block, as the options of the command say; raises OrchestrateError.

    `keys` describes what Ctrl-C does.
    """
    style = style_of(args, plan)
    if quiet(args):
        yield Display(_important, lambda line: None, style, Screen())
        return
    output = print_message if args.print_path or args.json else partial(stream, colored=style.colors)
    with _screen(args, plan, paths, keys) as screen:
        yield Display(print_message, output, style, screen)


def style_of(args: Args, plan: Plan) -> Style:
    """Return how the options say that lines are printed; raises UsageError for ranks that do not exist."""
    reserved = args.print_path or args.json
    if reserved and args.progress == "json":
        flag = "--json" if args.json else "--print-path"
        raise UsageError(f"{flag} and --progress json both print to stdout", "leave one of them out")
    return Style(
        ranks=ranks(args.ranks, len(plan.workers)) if args.ranks else None,
        timestamps=args.timestamps,
        colors=not reserved and args.progress != "json" and console.colors(sys.stdout),
        as_json=args.progress == "json",
    )


def _important(message: str) -> None:
    if message.startswith(IMPORTANT):
        print_message(message)


def _screen(args: Args, plan: Plan, paths: JobPaths, keys: str) -> contextlib.AbstractContextManager[Screen]:
    """Return the live view on a terminal, unless `--progress` says otherwise."""
    hide = run_dir.load(paths)[0].mask()
    if args.progress == "json":
        return contextlib.nullcontext(JsonScreen(plan, paths, hide))
    if args.progress == "plain" or (args.progress == "auto" and not console.replaces(sys.stderr)):
        return contextlib.nullcontext(PlainScreen(plan, paths, hide))
    from orchestrate.show.live import shown as live  # only here: it imports rich

    return live(plan, paths, keys, hide)


def ranks(text: str, workers: int) -> frozenset[int]:
    """Parse `0,3,8-15`; raises UsageError, also for a rank that none of the workers has."""
    found: set[int] = set()
    for part in text.split(","):
        if not (match := RANKS.fullmatch(part.strip())) or int(match[2] or match[1]) < int(match[1]):
            raise UsageError(f"--ranks {text} is not a list of ranks", "use a list such as 0,3 or 0-7")
        last = int(match[2] or match[1])
        if last >= workers:
            raise UsageError(f"there is no rank {last}", f"ranks are 0 to {workers - 1}")
        found.update(range(int(match[1]), last + 1))
    return frozenset(found)
