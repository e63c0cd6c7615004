"""Follow a job that another process supervises: its events, plans and output."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from orchestrate.errors import UsageError
from orchestrate.files import lock
from orchestrate.files.paths import JobPaths
from orchestrate.job import events, store
from orchestrate.job.logs import Follower
from orchestrate.job.spec import JobSpec
from orchestrate.supervise.output import listen, texts
from orchestrate.view.printer import Printer, Style
from orchestrate.view.progress import Reader
from orchestrate.view.screen import Screen


class Following:
    """What has been seen of a job."""

    def __init__(self, paths: JobPaths, spec: JobSpec, follower: Follower, screen: Screen, style: Style) -> None:
        """Continue where `follower` has read, and show everything on `screen`."""
        self.paths, self.follower, self.screen = paths, follower, screen
        self.printer = Printer(store.load(paths)[1], style)
        self.refresh = listen(follower, Reader(spec.metrics), screen)
        self.seen, self.size = 0, -1  # events, and bytes of their file
        follower.marks, follower.colors = False, style.colors

    @property
    def running(self) -> bool:
        """Whether the job has a supervisor."""
        return bool(lock.holder(self.paths)) and not store.ended(self.paths)

    def turn(self, end: bool = False) -> Iterator[str]:
        """Yield the output since the last call as text; `end` includes a last line without a newline."""
        if (size := _size(self.paths.events)) != self.size:
            self.size = size
            for event in _history(self.paths)[self.seen :]:
                self.seen += 1
                self._take(event)
        yield from texts(self.follower, self.printer, end)
        self.refresh()

    def _take(self, event: events.Event) -> None:
        if isinstance(event, events.GenerationStarting):
            plan = store.load(self.paths)[1]
            self.printer.planned(plan)
            self.screen.planned(plan)
            self.follower.follow(worker.rank for worker in plan.workers)
        self.screen.event(event)


def _history(paths: JobPaths) -> list[events.Event]:
    try:
        return store.history(paths)
    except UsageError:  # damaged; the report will name it
        return []


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
