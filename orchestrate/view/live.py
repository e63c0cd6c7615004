"""The live view: a picture of the job below its output, on a terminal."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.live import Live

from orchestrate import console
from orchestrate.files.lines import Lines
from orchestrate.files.paths import METRICS, JobPaths
from orchestrate.job.events import Event
from orchestrate.job.metrics import measurements
from orchestrate.job.outcomes import Activity
from orchestrate.job.plan import Plan
from orchestrate.view.render import picture
from orchestrate.view.screen import Screen
from orchestrate.view.state import View

INTERVAL = 0.25  # seconds between two pictures, at least: one of 64 ranks takes 4 ms
MAX_METRICS = 1 << 20  # bytes that are read for a picture
MAX_LINES = 500  # that wait for the next picture


class LiveScreen(Screen):
    """Draws the picture at intervals, and prints lines above it."""

    def __init__(self, plan: Plan, paths: JobPaths) -> None:
        """`paths` are the files of the job, whose metrics are shown."""
        self.view, self.paths, self.metrics = View(plan, time.monotonic()), paths, Lines()
        self.terminal = Console(file=sys.stderr, highlight=False)
        self.live = Live(
            console=self.terminal,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
            get_renderable=self._picture,
        )
        self.lines: list[str] = []
        self.drawn = 0.0
        self.lock = threading.RLock()
        self.watch = self._watch

    def _picture(self):  # type: ignore[no-untyped-def]
        size = self.terminal.size
        return picture(self.view, time.monotonic(), size.width, size.height)

    def above(self, line: str) -> None:
        """Print a line above the picture, with the next one."""
        with self.lock:
            self.lines.append(line)
            if len(self.lines) >= MAX_LINES:
                self._draw()

    def phase(self, text: str) -> None:
        """Show what is in progress."""
        with self.lock:
            self.view.enter(text, time.monotonic())

    def planned(self, plan: Plan) -> None:
        """Take the plan of the next generation."""
        with self.lock:
            self.view.planned(plan)

    def event(self, event: Event) -> None:
        """Take an event."""
        with self.lock:
            self.view.event(event, time.monotonic())

    def heard(self, rank: int, line: str) -> None:
        """Take a line that a worker has written."""
        with self.lock:
            if rank in self.view.ranks:
                self.view.ranks[rank].line(line, time.monotonic())

    def _watch(self, found: Mapping[int, Activity]) -> None:
        with self.lock:
            self.view.activity(found, time.monotonic())

    def refresh(self, bars: Mapping[int, str]) -> None:
        """Draw again, unless that was just done."""
        with self.lock:
            if time.monotonic() < self.drawn + INTERVAL:
                return
            self._measure()
            for rank, bar in bars.items():
                self.heard(rank, bar)
                self.view.enter("", time.monotonic())
            self._draw()

    def _measure(self) -> None:
        """Read what the script has written to metrics.jsonl since the last call."""
        with contextlib.suppress(OSError), self.paths.folder.open(METRICS) as file:
            last: dict[str, Any] = {}
            for values in measurements(self.metrics.new(file, MAX_METRICS)):
                last |= values
            if last:
                self.view.measure(last, time.monotonic())
                self.view.enter("", time.monotonic())  # the workers are working

    def _draw(self) -> None:
        with contextlib.suppress(OSError):  # the terminal is gone
            if self.lines:
                self.terminal.out("\n".join(self.lines), highlight=False)
            self.lines = []
            self.live.refresh()
        self.drawn = time.monotonic()

    def close(self) -> None:
        """Print the remaining lines, and remove the picture."""
        with self.lock:
            self._draw()
            self.live.stop()


@contextlib.contextmanager
def shown(plan: Plan, paths: JobPaths) -> Iterator[Screen]:
    """Show the live view of a job during a `with` block; everything that is printed appears above it."""
    screen = LiveScreen(plan, paths)
    screen.live.start()
    console.attach(screen)
    try:
        yield screen
    finally:
        console.attach(None)
        screen.close()
