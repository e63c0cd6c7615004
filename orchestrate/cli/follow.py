"""Follow a job that another process supervises: its events, plans and output."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from orchestrate.errors import UsageError
from orchestrate.record import events, lock, run_dir, usage
from orchestrate.record.logs import Follower
from orchestrate.record.paths import JobPaths
from orchestrate.record.progress import Reader
from orchestrate.show.printer import Style
from orchestrate.show.screen import Screen
from orchestrate.spec.spec import JobSpec
from orchestrate.supervise.output import LAST_LINES_TIMEOUT, Printing, listen

USAGE_INTERVAL = 1.0  # seconds


class Following:
    """What has been seen of a job."""

    def __init__(self, paths: JobPaths, spec: JobSpec, follower: Follower, screen: Screen, style: Style) -> None:
        """Continue where `follower` has read, and show everything on `screen`."""
        self.paths, self.follower, self.screen = paths, follower, screen
        self.printing = Printing(follower, run_dir.load(paths)[1], style)
        self.refresh = listen(follower, Reader(spec.metrics), screen)
        self.seen, self.size = 0, -1  # events, and bytes of their file
        self.used, self.due = 0.0, 0.0  # time of the last usage, and of the next question for it

    @property
    def running(self) -> bool:
        """Whether the job has a supervisor."""
        return bool(lock.holder(self.paths)) and not run_dir.ended(self.paths)

    def _use(self) -> None:
        """Show what the workers use, if the screen does; their supervisor writes it once it is asked."""
        if not self.screen.watch or time.monotonic() < self.due:
            return
        self.due = time.monotonic() + USAGE_INTERVAL
        with contextlib.suppress(OSError):
            usage.ask(self.paths)
        written, found = usage.read(self.paths)
        if written > self.used:
            self.used = written
            self.screen.watch(found)

    def turn(self, end: bool = False) -> Iterator[str]:
        """Yield the output since the last call as text; `end` includes a last line without a newline."""
        if (size := _size(self.paths.events)) != self.size:
            self.size = size
            found = _history(self.paths)
            if found and not self.seen:
                self.screen.began(max(0.0, time.time() - found[0].time))
            for event in found[self.seen :]:
                self.seen += 1
                self._take(event)
        until, unread = time.monotonic() + LAST_LINES_TIMEOUT, True
        while unread and time.monotonic() < until:
            before = self.follower.offsets()
            yield from self.printing.texts(end)
            unread = end and self.follower.offsets() != before  # before the end, there is another turn
        self._use()
        self.refresh()

    def _take(self, event: events.Event) -> None:
        if isinstance(event, events.GenerationStarting):
            plan = run_dir.load(self.paths)[1]
            self.printing.planned(plan)
            self.screen.planned(plan)
        self.screen.event(event)


def _history(paths: JobPaths) -> list[events.Event]:
    try:
        return run_dir.history(paths)
    except UsageError:  # damaged; the report will name it
        return []


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
