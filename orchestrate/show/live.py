"""The live view: a picture of the job below its output, on a terminal."""

from __future__ import annotations

import contextlib
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping

from rich.console import Console
from rich.live import Live

from orchestrate import console
from orchestrate.clock import SYSTEM, Clock
from orchestrate.plan.plan import Plan
from orchestrate.record.paths import JobPaths
from orchestrate.record.progress import Progress
from orchestrate.show.render import picture
from orchestrate.show.tracking import TrackingScreen

INTERVAL = 0.25  # seconds between two pictures, at least
MAX_LOAD = 0.02  # of a core; a picture of 64 ranks takes 4 to 12 ms, depending on the size of the terminal
MAX_LINES, MAX_WAITING = 500, 1 << 18  # lines that wait for the next picture, and their characters
LOCK_TIMEOUT = 1.0  # seconds


class LiveScreen(TrackingScreen):
    """Draws the picture at intervals, and prints lines above it."""

    def __init__(
        self,
        plan: Plan,
        paths: JobPaths,
        keys: str,
        hide: Callable[[str], str] = str,
        clock: Clock = SYSTEM,
        cpu: Callable[[], float] = time.thread_time,
    ) -> None:
        """`paths` are the files of the job, whose metrics are shown; `keys` describes what Ctrl-C does.

        `hide` removes secrets from names of metrics; `cpu()` is the thread's CPU time in seconds.
        """
        super().__init__(plan, paths, hide, clock)
        self.keys, self.cpu = keys, cpu
        self.terminal = Console(file=sys.stderr, highlight=False)
        self.live = Live(
            console=self.terminal,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
            get_renderable=self._picture,
        )
        self.lines: deque[str] = deque()  # for the next picture
        self.waiting = 0  # characters in them
        self.due = 0.0  # when the next picture may be drawn
        self.watch = self.activity

    def _picture(self):  # type: ignore[no-untyped-def]
        size = self.terminal.size
        return picture(self.view, self.clock.monotonic(), size.width, size.height, self.keys)

    def above(self, line: str) -> None:
        """Print a line above the picture, with the next one; at once if there is none anymore."""
        self.lines.append(line)
        self.waiting += len(line)
        with self._held() as held:
            if held and (len(self.lines) >= MAX_LINES or self.waiting >= MAX_WAITING or not self.live.is_started):
                self._draw()

    def phase(self, text: str) -> None:
        """Show what is in progress."""
        with self._held() as held:
            if held:
                self.view.enter(text, self.clock.monotonic())

    def refresh(self, bars: Callable[[], Mapping[int, Progress | None]]) -> None:
        """Draw again, unless that was just done."""
        with self.lock:
            if self.clock.monotonic() < self.due:
                return
            began = self.cpu()
            self.catch_up(bars())
            self._draw()
            self.due = self.clock.monotonic() + max(INTERVAL, (self.cpu() - began) / MAX_LOAD)

    def _draw(self) -> None:
        lines, self.waiting = [self.lines.popleft() for _ in range(len(self.lines))], 0
        with self._writing():
            if lines:
                self.terminal.out("\n".join(lines), highlight=False)
            self.live.refresh()

    @contextlib.contextmanager
    def _held(self) -> Iterator[bool]:
        """Hold the lock, unless another thread does for long: it writes to a terminal that is not read."""
        held = self.lock.acquire(timeout=LOCK_TIMEOUT)
        try:
            yield held
        finally:
            if held:
                self.lock.release()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Write nothing anymore once the terminal is gone: the library would keep all of it to try again."""
        try:
            yield
        except OSError as error:
            self.terminal.quiet = self.terminal.quiet or error.errno in console.READER_LEFT

    def close(self) -> None:
        """Print the remaining lines, and remove the picture."""
        with self._held() as held, self._writing():
            if held:
                self._draw()
                self.live.stop()


@contextlib.contextmanager
def shown(plan: Plan, paths: JobPaths, keys: str, hide: Callable[[str], str]) -> Iterator[LiveScreen]:
    """Show the live view of a job during a `with` block; everything that is printed appears above it."""
    screen = LiveScreen(plan, paths, keys, hide)
    screen.live.start()
    console.attach(screen)
    try:
        yield screen
    finally:
        console.attach(None)
        screen.close()
