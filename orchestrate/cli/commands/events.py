"""`events`: what happened to a job, and when."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

from orchestrate import errors
from orchestrate.cli import find, options, waiting
from orchestrate.cli.args import Args
from orchestrate.cli.parser import Parser
from orchestrate.console import out, print_message, shortened
from orchestrate.host import records
from orchestrate.record import events, report, run_dir
from orchestrate.record.events import Event

MAX_VALUE = 100  # characters of a value
LEFT_OUT = ("time", "seconds", "version", "states", "use", "known", "exchanged", "hosts", "boot", "monotonic")


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `events`."""
    options.add_job_name(parser, latest=True)
    options.add_runs(parser)
    options.add_follow(parser)


def run(args: Args) -> int:
    """Print the events of a job, one per line; with `--follow`, until it ends."""
    paths, shown = find.paths_of(args), 0
    if not records.find(paths.root):
        print_message(f"warning: {args.shown / paths.root.name} is a copy, whose events may have been changed")
    with waiting.detaching(paths.root.name):
        for _ in waiting.rounds(args, paths):
            found = run_dir.history(paths)
            for event in found[shown:]:
                out(_line(event))
            shown = len(found)
    return errors.SUCCEEDED


def _line(event: Event) -> str:
    """Format an event: local time, seconds since the start of the job, name, and what it is about."""
    clock = time.strftime("%H:%M:%S", time.localtime(event.time))
    about = report.line(event).partition("\n")[0] or ", ".join(_values(dataclasses.asdict(event)))
    return f"{clock}  {event.seconds:9.3f} s  {events.name(type(event)):<20}  {about}".rstrip()


def _values(values: dict[str, Any]) -> Iterator[str]:
    for key, value in values.items():
        if key in LEFT_OUT or (not value and type(value) is not int):
            continue
        value = value["summary"] if isinstance(value, dict) and "summary" in value else value
        text = ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
        yield f"{key.replace('_', ' ')} {shortened(text, MAX_VALUE)}"
