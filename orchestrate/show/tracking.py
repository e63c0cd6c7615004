"""Screens that keep the state of the job: events, progress in the output, and metrics."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from orchestrate.clock import SYSTEM, Clock
from orchestrate.console import print_message
from orchestrate.files.lines import Lines
from orchestrate.files.paths import METRICS
from orchestrate.plan.plan import Plan
from orchestrate.record.events import Event
from orchestrate.record.metrics import measurements
from orchestrate.record.outcomes import Activity
from orchestrate.record.paths import JobPaths
from orchestrate.record.progress import Progress
from orchestrate.show.screen import Screen
from orchestrate.show.state import View, status

MAX_METRICS = 1 << 20  # bytes that are read at a time
FIRST_STATUS, STATUS_INTERVAL = 15.0, 60.0  # seconds to the first line of status, and between two others
READ_INTERVAL = 5.0  # seconds between two reads of metrics.jsonl


class TrackingScreen(Screen):
    """Folds everything into a View."""

    def __init__(self, plan: Plan, paths: JobPaths, hide: Callable[[str], str] = str, clock: Clock = SYSTEM) -> None:
        """`paths` are the files of the job, whose metrics are read; `hide` removes secrets from their names."""
        self.paths, self.metrics, self.hide, self.clock = paths, Lines(), hide, clock
        self.view = View(plan, clock.monotonic())
        self.lock = threading.RLock()

    def began(self, seconds: float) -> None:
        """Record how long ago the job began."""
        with self.lock:
            self.view.began = self.view.work.since = self.clock.monotonic() - seconds

    def planned(self, plan: Plan) -> None:
        """Record the plan of the next generation."""
        with self.lock:
            self.view.planned(plan)

    def event(self, event: Event) -> None:
        """Record an event."""
        age = max(0.0, self.clock.time() - event.time) if event.time else 0.0
        with self.lock:
            self.view.event(event, self.clock.monotonic(), age)

    def heard(self, rank: int, found: Sequence[Progress]) -> None:
        """Record the progress in lines that a worker has written."""
        with self.lock:
            if rank in self.view.ranks:
                self.view.hear(rank, found, self.clock.monotonic())

    def activity(self, found: Mapping[int, Activity]) -> None:
        """Record the activity of the workers."""
        with self.lock:
            self.view.activity(found, self.clock.monotonic())

    def catch_up(self, bars: Mapping[int, Progress | None]) -> None:
        """Record progress bars, and what the script has written to metrics.jsonl since the last call."""
        with self.lock:
            self._measure()
            for rank, found in bars.items():
                self.heard(rank, [found] if found else [])
                self.view.enter("", self.clock.monotonic())

    def _measure(self) -> None:
        """Read what the script has written to metrics.jsonl since the last call."""
        with contextlib.suppress(OSError), self.paths.folder.open(METRICS) as file:
            last: dict[str, Any] = {}
            self.metrics.near_end(file, MAX_METRICS)
            for values in measurements(self.metrics.new(file, MAX_METRICS)):
                self.view.work.steps.record(values)
                last |= {self.hide(name): value for name, value in values.items()}
            if last:
                self.view.measure(last, self.clock.monotonic())
                self.view.enter("", self.clock.monotonic())  # the workers are working


class PlainScreen(TrackingScreen):
    """Prints a line of status from time to time."""

    def __init__(self, plan: Plan, paths: JobPaths, hide: Callable[[str], str] = str, clock: Clock = SYSTEM) -> None:
        """The same as a TrackingScreen."""
        super().__init__(plan, paths, hide, clock)
        self.printed, self.due, self.next_read = "", clock.monotonic() + FIRST_STATUS, 0.0

    def refresh(self, bars: Callable[[], Mapping[int, Progress | None]]) -> None:
        """Print the status, if it is time and it has changed."""
        if self.clock.monotonic() >= min(self.next_read, self.due):  # also between two lines, to know the pace
            self.next_read = self.clock.monotonic() + READ_INTERVAL
            self.catch_up(bars())
        if self.clock.monotonic() < self.due:
            return
        self.due = self.clock.monotonic() + STATUS_INTERVAL
        with self.lock:
            text = status(self.view, self.clock.monotonic())
        if text and text != self.printed:
            self.printed = text
            print_message(f"{self.view.job_id}: {text}")
