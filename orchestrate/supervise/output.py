"""The output of workers while a job runs: read, searched for progress, noted with its time, and shown in turn."""

from __future__ import annotations

import contextlib
import logging
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from orchestrate import patience
from orchestrate.console import phase, progress
from orchestrate.plan.plan import Plan
from orchestrate.record import report, usage
from orchestrate.record.events import Event, WorkersStarted
from orchestrate.record.logs import Follower
from orchestrate.record.outcomes import Activity
from orchestrate.record.paths import JobPaths
from orchestrate.record.progress import Progress, Reader, parse
from orchestrate.record.times import TimesWriter
from orchestrate.show.printer import Printer, Style
from orchestrate.show.screen import Screen, Shown
from orchestrate.supervise.running import Watch

log = logging.getLogger(__name__)

INTERVAL = (0.05, 0.25)  # seconds between reads of the logs, while workers write and while they are silent
MAX_READ, MIN_READ = 1 << 20, 8 << 10  # bytes of all logs, and at least of each, per read
MAX_SHOW_SECONDS = 1.0  # seconds to show the lines of one read, before the supervisor's own
LAST_LINES_TIMEOUT = 10.0  # seconds to show the remaining output at the end of a job
READER_TIMEOUT = 60.0  # seconds for a slow reader of our output to take the last lines


def listen(
    follower: Follower, reader: Reader, screen: Screen, *takes: Callable[[Progress], None]
) -> Callable[[], None]:
    """Pass progress in the workers' output to `screen`, and that of one worker to each of `takes`.

    That is rank 0, or, if the job has no patterns of its own, the lowest rank that has printed some.

    Returns a function that refreshes the screen, with the current progress bars.
    """

    lowest = 0 if reader.given else sys.maxsize

    def heard(rank: int, line: str) -> None:
        nonlocal lowest
        screen.heard(rank, found := reader.parse(line) if rank == 0 else parse(line))
        if found and rank <= lowest:
            lowest = rank
            for take in takes:
                take(found)

    follower.heard = heard

    def bars() -> dict[int, Progress | None]:
        return {rank: reader.parse(bar) if rank == 0 else parse(bar) for rank, bar in follower.bars().items()}

    return lambda: screen.refresh(bars)


class Printing:
    """The output of workers as text: where it is read, and how it is printed."""

    def __init__(self, follower: Follower, plan: Plan, style: Style) -> None:
        """Continue where `follower` has read; what starts a generation is announced by its event."""
        self.follower, self.printer = follower, Printer(plan, style)
        follower.marks, follower.colors = False, style.colors

    def planned(self, plan: Plan) -> None:
        """Take the plan of a generation."""
        self.follower.follow(worker.rank for worker in plan.workers)
        self.printer.planned(plan)

    def texts(self, end: bool) -> Iterator[str]:
        """Yield the next part of the output."""
        ranks = len(self.follower.ranks)
        most = MAX_READ if ranks < 2 else max(MIN_READ, MAX_READ // ranks)
        return self.printer.texts(self.follower.lines(end, most), time.time())

    def bar(self) -> str:
        """Return the progress bar of the first rank that has one; empty if there is none."""
        return self.printer.bar(self.follower.bars(), time.time())


class Usage(Watch):
    """Passes what the workers are doing to the screen, and to other processes that ask for it."""

    def __init__(self, paths: JobPaths, screen: Screen) -> None:
        self.paths, self.screen = paths, screen

    @property
    def wanted(self) -> bool:
        """Whether the screen shows it, or another process asks for it."""
        return self.screen.watch is not None or usage.asked(self.paths)

    def take(self, found: Mapping[int, Activity]) -> None:
        """Take what the workers are doing, by rank."""
        if self.screen.watch:
            self.screen.watch(found)
        if usage.asked(self.paths):
            try:
                usage.write(self.paths, found)
            except OSError as error:
                log.debug("%s cannot be written: %s", self.paths.usage, error)


class Output:
    """Shows the output of workers, and the supervisor's messages between the lines before and after them."""

    def __init__(
        self, follower: Follower, plan: Plan, shown: Shown, times: TimesWriter, refresh: Callable[[], None]
    ) -> None:
        """`refresh` is called after each read."""
        self.follower, self.shown, self.times, self.refresh = follower, shown, times, refresh
        self.printing = Printing(follower, plan, shown.style)
        self.queued: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.wake, self.done = threading.Event(), threading.Event()
        self.remaining: Iterator[str] = iter(())  # lines of a read that took too long to show

    def in_turn(self, action: Callable[[], None]) -> None:
        """Queue other output, to be shown after the lines that workers have written so far."""
        if self.done.is_set():  # nothing is read anymore
            return action()
        self.queued.put(action)
        self.wake.set()  # show it before the next generation's output

    def event(self, event: Event) -> None:
        """Show an event in turn: after the output of an earlier generation."""
        self.in_turn(partial(self.shown.screen.event, event))
        if (text := report.phase(event)) is not None:
            late = isinstance(event, WorkersStarted)  # a worker may have written before the others started
            self.in_turn(lambda: phase(text if self.follower.silent or not late else ""))
        if message := report.line(event):
            self.in_turn(partial(self.shown.message, message))

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """Show output as it arrives, and all of it before the context exits.

        One thread shows everything, so that a reader that blocks does not block the supervisor.
        """
        thread = threading.Thread(target=self._follow, daemon=True)
        thread.start()
        try:
            yield
        finally:
            try:
                self.done.set()
                self.wake.set()
                thread.join(READER_TIMEOUT)
                phase("")
            except patience.Abandoned:  # the logs have the rest
                patience.calm()

    def _follow(self) -> None:
        pause = INTERVAL[0]
        while not self.done.is_set():
            self.wake.wait(pause)
            self.wake.clear()
            pause = INTERVAL[0] if self._turn() else min(INTERVAL[1], 1.5 * pause)
        until = time.monotonic() + LAST_LINES_TIMEOUT
        while self._turn(end=True):
            if time.monotonic() > until:
                return self.shown.message(f"warning: some worker output was not shown: see {self.follower.paths.logs}")

    def _turn(self, end: bool = False) -> bool:
        """Show what is new; return whether anything was, or may follow. An error must not end all output."""
        before = self.follower.offsets()
        try:
            return bool(self._catch_up(end)) or self.follower.offsets() != before
        except Exception:
            log.exception("output of the workers could not be shown")
            return self.follower.offsets() != before

    def _catch_up(self, end: bool) -> int:
        """Show what workers have written, and then what was queued before; return how much that was."""
        shown = count = self.queued.qsize()
        until, fresh = time.monotonic() + MAX_SHOW_SECONDS, False
        while True:
            if (line := next(self.remaining, None)) is not None:
                phase("")
                self.shown.show(line)
                shown += 1
                if time.monotonic() > until:
                    break
            elif fresh:
                break
            else:
                self.remaining, fresh = self.printing.texts(end), True
        self._note(end)
        for _ in range(count):
            self.queued.get()()
        if bar := self.printing.bar():
            progress(bar, self.shown.show)
        self.refresh()
        return shown

    def _note(self, end: bool) -> None:
        try:
            self.times.note(self.follower.offsets(), end)
        except OSError as error:
            log.debug("no times of lines: %s", error)
