"""What happens in a job, shown in turn: the output of its workers, as it arrives in their logs, and its events.

A supervisor passes its events to the feed; a command that follows another process's job reads them from its record.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

from orchestrate import patience
from orchestrate.console import phase, progress
from orchestrate.errors import UsageError
from orchestrate.plan.plan import Plan
from orchestrate.record import report, run_dir, usage
from orchestrate.record.events import Event, GenerationStarting, WorkersStarted
from orchestrate.record.logs import Block, Follower, rest
from orchestrate.record.outcomes import Activity
from orchestrate.record.paths import JobPaths
from orchestrate.record.progress import Progress, Reader, parse
from orchestrate.record.times import Times, TimesWriter
from orchestrate.show.format import Printer
from orchestrate.show.screen import Display
from orchestrate.spec.spec import JobSpec

log = logging.getLogger(__name__)

INTERVAL = (0.05, 0.25)  # seconds between reads of the logs, while workers write and while they are silent
MAX_READ, MIN_READ = 1 << 20, 8 << 10  # bytes of all logs, and at least of each, per read
MAX_SHOW_SECONDS = 1.0  # seconds to show the lines of one read, before what has happened meanwhile
LAST_LINES_TIMEOUT = 10.0  # seconds to show the remaining output at the end of a job
# Bytes at the end of each log that are searched for progress without being shown, and seconds of CPU time for all.
MAX_SEARCH, UNSEEN_SECONDS = 8 << 20, 5.0
RECENT = 50  # lines of other workers in which their progress is searched, of those read together
USAGE_INTERVAL = 1.0  # seconds
READER_TIMEOUT = 60.0  # seconds for a slow reader of our output to take the last lines


class Feed:
    """Shows the output of workers, and what else happens between the lines before and after it."""

    def __init__(
        self, paths: JobPaths, spec: JobSpec, plan: Plan, display: Display, follower: Follower | None = None
    ) -> None:
        """Continue where `follower` has read (default: begin with the first line)."""
        self.paths, self.display, self.screen = paths, display, display.screen
        self.printer, self.reader = Printer(plan, display.style), Reader(spec.metrics)
        self.follower = follower or rest(paths, spec, plan, None)
        self.follower.marks, self.follower.colors = False, display.style.colors
        self.times: TimesWriter | None = None
        self.listeners: list[Callable[[Progress], None]] = []  # get the progress of one worker, line by line
        self.lowest = 0 if spec.metrics else sys.maxsize  # the rank of that worker: the lowest that has printed some
        self.queued: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.wake, self.done = threading.Event(), threading.Event()
        self.used: Mapping[int, Activity] | None = None  # the last activity of workers, until it is displayed
        self.stuck = False  # whether our output is not read at the end
        self.remaining: Iterator[str] = iter(())  # text of a read that took too long to show

    # --- what happens in the job

    def planned(self, plan: Plan) -> None:
        """Record the plan of a generation: its ranks are followed, under the names of their nodes."""
        self.follower.follow(worker.rank for worker in plan.workers)
        self.printer.planned(plan)
        self.in_turn(partial(self.screen.planned, plan))

    def event(self, event: Event) -> None:
        """Show an event in turn: after the output of an earlier generation."""
        self.in_turn(partial(self.screen.event, event))
        if (text := report.phase(event)) is not None:
            late = isinstance(event, WorkersStarted)  # a worker may have written before the others started
            self.in_turn(lambda: self._phase(text if self.follower.silent or not late else ""))
        if message := report.line(event):
            self.in_turn(partial(self.display.message, message))

    def message(self, text: str) -> None:
        """Show a message at once."""
        if self.stuck:
            log.warning("not shown: %s", text)
        else:
            self.display.message(text)

    def problems(self) -> list[str]:
        """Describe patterns of the job file that have found nothing, at the end of a job."""
        return self.reader.problems()

    def is_behind(self) -> bool:
        """Whether workers have printed what was not searched yet: a slow reader keeps it from that."""
        return self.follower.is_behind()

    @property
    def wants_use(self) -> bool:
        """Whether the activity of workers is displayed."""
        return self.screen.watch is not None

    def use(self, found: Mapping[int, Activity]) -> None:
        """Show the activity of workers, by rank."""
        self.used = found

    def in_turn(self, action: Callable[[], None]) -> None:
        """Queue what is to be shown after the lines that workers have written so far."""
        if self.done.is_set():  # nothing is read anymore
            return None if self.stuck else action()
        self.queued.put(action)
        self.wake.set()  # show it before the next generation's output

    # --- showing it

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """Show output as it arrives, note when that was, and show all of it before the context exits.

        One thread shows everything, so that a reader that blocks does not block the supervisor.
        """
        self.times = TimesWriter(self.paths.times)
        thread = threading.Thread(target=self._follow, daemon=True)
        thread.start()
        try:
            yield
        finally:
            try:
                self.done.set()
                self.wake.set()
                thread.join(READER_TIMEOUT)
                self.stuck = thread.is_alive()
                if self.is_behind():
                    self._search_unread()
                self._phase("")
            except patience.Abandoned:  # the logs have the rest
                patience.calm()

    def _follow(self) -> None:
        self._search_each(self._gap())
        pause = INTERVAL[0]
        while not self.done.is_set():
            self.wake.wait(pause)
            self.wake.clear()
            pause = INTERVAL[0] if self.turn() else min(INTERVAL[1], 1.5 * pause)
        self.last()

    def last(self) -> None:
        """Show all that is left, with a last line without a newline."""
        until = time.monotonic() + LAST_LINES_TIMEOUT
        while self.turn(end=True):
            if time.monotonic() > until:
                self.message(f"warning: some worker output was not shown: see {self.paths.logs}")
                break
        self._phase("")

    def turn(self, end: bool = False) -> bool:
        """Show what is new; return whether anything was, or may follow. An error must not end all output."""
        before = self.follower.offsets()
        try:
            return self._catch_up(end) or self.follower.offsets() != before
        except Exception:
            log.exception("output of the workers could not be shown")
            return self.follower.offsets() != before

    def _catch_up(self, end: bool) -> bool:
        """Show what workers have written, and then what was queued before; return whether that was anything."""
        count = self.queued.qsize()
        shown = self._show_output(end) or bool(count)
        if self.times:
            try:
                self.times.note(self.follower.offsets(), end)
            except OSError as error:
                log.debug("no times of lines: %s", error)
        for _ in range(count):
            self.queued.get()()
        used, self.used = self.used, None
        if used is not None and self.screen.watch:
            self.screen.watch(used)
        if self.display.phases and (bar := self.printer.bar(self.follower.bars(), time.time())):
            progress(bar, self.display.show)
        self.screen.refresh(self._bars)
        return shown

    def _show_output(self, end: bool) -> bool:
        """Show the next part of the output: what is left of the last read, and another read if there is time."""
        until, shown, fresh = time.monotonic() + MAX_SHOW_SECONDS, False, False
        while time.monotonic() < until or not shown:
            if (text := next(self.remaining, None)) is not None:
                self._phase("")
                self.display.show(text)
                shown = True
            elif fresh:
                break
            else:
                self.remaining, fresh = self.printer.texts(self._blocks(end), time.time()), True
        return shown

    def _blocks(self, end: bool) -> Iterator[Block]:
        """Read the next lines of each log, and search them for progress."""
        ranks = len(self.follower.ranks)
        for block in self.follower.blocks(end, MAX_READ if ranks < 2 else max(MIN_READ, MAX_READ // ranks)):
            self.screen.heard(block.rank, self._search(block))
            yield block

    def _search_unread(self) -> None:
        """Search the output that is not shown for progress, since the report has the last metrics."""
        unread = self.follower.copied()
        unread.near_end(MAX_SEARCH)
        self._search_each(unread.blocks(end=True))

    def _search_each(self, blocks: Iterable[Block]) -> None:
        """Search output that is not shown for progress, as far as there is time."""
        until = time.thread_time() + UNSEEN_SECONDS
        for block in blocks:
            if time.thread_time() > until:
                log.warning("not all output was searched for progress")
                break
            self._search(block)

    def _gap(self) -> Iterator[Block]:
        """Read what workers have written after an earlier supervisor had read the rest, and before we begin."""
        for rank, notes in Times(self.paths.times, max(self.follower.read, default=0) + 1).notes.items():
            end, read = self.follower.read[rank].offset, notes[0][0]
            if read < end:
                gap = Follower(self.paths, [rank], marks=False, hide=self.follower.hide)
                gap.read[rank].offset, gap.read[rank].cut = max(read, end - MAX_SEARCH) - 1, True
                yield from gap.blocks(most=end - gap.read[rank].offset)

    def _search(self, block: Block) -> list[Progress]:
        """Return the progress in lines of a worker, and pass it to the listeners."""
        lines = block.text.split("\n")
        if block.rank > self.lowest:  # only its current progress is shown
            lines = lines[-RECENT:]
        found = [one for line in lines if (one := self._parse(block.rank, line))]
        if found and block.rank <= self.lowest:
            self.lowest = block.rank
            for take in self.listeners:
                for one in found:
                    take(one)
        return found

    def _parse(self, rank: int, line: str) -> Progress | None:
        return self.reader.parse(line) if rank == 0 else parse(line)

    def _phase(self, text: str) -> None:
        if self.display.phases:
            phase(text)

    def _bars(self) -> dict[int, Progress | None]:
        return {rank: self._parse(rank, bar) for rank, bar in self.follower.bars().items()}


class Recorded:
    """Passes to a feed what another process records of a job: events, plans, and what its workers use."""

    def __init__(self, paths: JobPaths, feed: Feed, past: bool = False) -> None:
        """The first turn passes what has happened so far to the screen, with messages only if `past`."""
        self.paths, self.feed = paths, feed
        self.seen, self.size = 0, 0 if past else -1  # events, and bytes of their file
        self.used, self.due = 0.0, 0.0  # time of the last usage, and of the next question for it

    def turn(self) -> None:
        """Pass what is new."""
        if (size := _size(self.paths.events)) != self.size:
            to, self.size = self.feed if self.size >= 0 else self.feed.screen, size
            found = _history(self.paths)
            if found and not self.seen:
                self.feed.screen.began(max(0.0, time.time() - found[0].time))
            fresh = found[self.seen :]
            starting = any(isinstance(event, GenerationStarting) for event in fresh)
            plan = run_dir.load(self.paths)[1] if starting else None  # the newest one, of all of them
            for event in fresh:
                if plan and isinstance(event, GenerationStarting):
                    to.planned(plan)
                to.event(event)
            self.seen = max(self.seen, len(found))
        self._use()

    def _use(self) -> None:
        """Show what the workers use, if the screen does; their supervisor writes it once it is asked."""
        if not self.feed.wants_use or time.monotonic() < self.due:
            return
        self.due = time.monotonic() + USAGE_INTERVAL
        with contextlib.suppress(OSError):
            usage.ask(self.paths)
        written, found = usage.read(self.paths)
        if written > self.used:
            self.used = written
            self.feed.use(found)


def _history(paths: JobPaths) -> list[Event]:
    try:
        return run_dir.history(paths)
    except UsageError:  # damaged; the report will name it
        return []


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
