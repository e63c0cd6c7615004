"""Files of a running job, as its supervisor reads them: activity, progress, and last lines of workers."""

from __future__ import annotations

import contextlib
import json
import stat
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from orchestrate.clock import Clock, wait_until
from orchestrate.console import shortened
from orchestrate.files.folder import Folder, content, gone, grant_access
from orchestrate.files.lines import Lines, last
from orchestrate.files.paths import CHECKPOINTS, LOGS, METRICS, WORK
from orchestrate.files.work import Facts, tidy
from orchestrate.host import records
from orchestrate.node.messages import checks
from orchestrate.plan.plan import Placement
from orchestrate.record import logs
from orchestrate.record.metrics import MAX_LINE, MAX_METRICS, MAX_ROWS, fold, measurements
from orchestrate.record.paths import JobPaths
from orchestrate.record.progress import Progress
from orchestrate.record.report import Written
from orchestrate.supervise.printed import Printed

LAST_LINES, MAX_WIDTH = 12, 2000  # lines of a failed worker that are reported, and characters of each
CATCH_UP_TIMEOUT = 1.0  # seconds for what shows the output to read the end of it
REMOVED_AFTER = 3.0  # seconds for which the run directory must be away to count as removed
CONTEXT = 300  # lines of a failed worker in which its error is searched
MAX_METRICS_READ = 8 << 20  # bytes of metrics.jsonl per call
MAX_SECONDS = 1.0  # of CPU time for that: meanwhile, no one handles a request to stop
MAX_WRITTEN = 10_000  # files of the working directory that the report lists


class JobFiles:
    """Reads the files of a job for its supervisor, and writes the fence."""

    def __init__(
        self, paths: JobPaths, hide: Callable[[str], str] = str, is_behind: Callable[[], bool] = lambda: False
    ) -> None:
        """`hide` removes secrets from worker output; `is_behind` is whether `heard` has not got all of it yet."""
        self.paths, self.hide, self.is_behind = paths, hide, is_behind
        self.generation = 0  # the generation that `last_lines` reads
        self.first: int | None = None  # step of the job
        self.began: int | None = None  # the first step of this generation
        self._step, self._metrics = 0, Lines()
        self._printed, self._heard = Printed(), False  # whether workers of this generation have printed progress

    def begin(self, generation: int) -> None:
        """Read what a generation writes from now on."""
        self.step()
        self.generation, self.began = generation, None
        self._printed.begin()
        self._heard = False

    @property
    def _folder(self) -> Folder:
        return self.paths.folder

    def gone(self) -> bool:
        """Whether the run directory is not there; nodes cannot remove it, but a disk can be away for a moment."""
        roots = {self.paths.root, self._folder.parent}  # of the job and of its cluster
        return gone(self.paths.shared) or any(map(records.replaced, roots))

    def last_lines(self, rank: int, count: int = LAST_LINES, main: bool = False) -> list[str]:
        """Return the last lines of a worker in this generation, truncated, since events store them permanently."""
        return [shortened(line, MAX_WIDTH) for line in logs.last_lines(self.text(rank), self.generation, count, main)]

    def text(self, rank: int) -> str:
        """Return the end of a worker's log."""
        return self.hide(logs.tail(self._folder, rank))

    def log(self, rank: int) -> Path:
        """Return the path of a worker's log."""
        return self.paths.log(rank)

    def heard(self, found: Progress) -> None:
        """Record the progress of the job in a line of the output."""
        self._printed.record(found)
        self._heard |= bool(found.metrics) or found.step is not None
        if (step := found.of_job) is not None:
            self._reached(step)

    def step(self) -> int:
        """Return the highest `step` in metrics.jsonl and in the output, or 0."""
        with contextlib.suppress(OSError), self._folder.open(METRICS) as file:
            if file.seek(0, 2) < self._metrics.offset:  # the script has truncated the file
                self._metrics = Lines()
            end, until = self._metrics.offset + MAX_METRICS_READ, time.thread_time() + MAX_SECONDS
            goes_on = lambda: self._metrics.offset < end and time.thread_time() < until  # noqa: E731
            for values in measurements(self._metrics.new_while(goes_on, file)):
                if type(step := values.get("step")) is int and 0 <= step < 1 << 63:
                    self._step = max(self._step, step)
                    self._reached(step)
        return max(self._step, self._printed.step)

    def last_step(self, furthest: int, clock: Clock) -> tuple[int, bool]:
        """Return the step at the end of a generation, and whether there may be a later one in output that is not read.

        That is waited for if the job has not come further than before.
        """
        if (step := self.step()) > furthest or not furthest:
            return step, False
        caught_up = wait_until(lambda: not self.is_behind(), CATCH_UP_TIMEOUT, clock, 0.05)
        return self.step(), not caught_up

    def _reached(self, step: int) -> None:
        self.first = step if self.first is None else self.first
        self.began = step if self.began is None else self.began

    def has_progress(self) -> bool:
        """Whether there is a step in metrics.jsonl, or a step or a metric in the output, of this generation."""
        self.step()
        return self._heard or self.began is not None

    def metrics(self) -> list[dict[str, Any]]:
        """Return the rows of metrics.jsonl for the report, only the last ones if there are too many.

        Without that file, return the last metrics in the output.
        """
        with contextlib.suppress(OSError), self._folder.open(METRICS) as file:
            lines = (line for line in last(file, MAX_METRICS, MAX_ROWS) if 0 < len(line) <= MAX_LINE)
            return fold(deque(lines, MAX_ROWS))
        printed = self._printed.metrics()
        return [printed] if printed else []

    def checkpoints(self) -> tuple[list[Path], bool]:
        """Return the checkpoint files, and whether the list is complete."""
        found, whole = self._folder.files(CHECKPOINTS)
        return [self.paths.root / path for path in found], whole

    def keep_copied(self, copied: Mapping[str, Facts]) -> None:
        """Save which files were copied to the working directory; raises OSError."""
        records.put(self.paths.copied, json.dumps(copied) + "\n")

    def copied(self) -> dict[str, Facts]:
        """Return the files that were copied; empty if that is not known."""
        found: dict[str, Facts] = {}
        with contextlib.suppress(OSError, ValueError, RecursionError):
            checks.limit_values((text := content(self.paths.copied)).encode(), checks.MAX_VALUES)
            data = json.loads(text)
            for path, facts in data.items() if isinstance(data, dict) else ():
                if isinstance(facts, list) and len(facts) == 2:
                    found[path] = facts[0], facts[1]
        return found

    def remove_unchanged_copies(self, placement: Placement) -> Written | None:
        """Remove the files of the working directory that no worker has changed, once nodes cannot reach them anymore.

        Return the others; None if workers ran in the code folder itself.
        """
        if not placement.has_work:
            return None
        with contextlib.suppress(OSError):
            found = tidy(Path(placement.code), self._folder, WORK, placement.original, MAX_WRITTEN, self.copied())
            return Written(self.paths.work, *found)
        return Written(self.paths.work, [], False)

    def saved(self) -> tuple[tuple[str, int], ...]:
        """Return names and modification times in the checkpoints folder; the value changes with every save."""
        found = self._folder.entries(CHECKPOINTS)
        return tuple(sorted((name, status.st_mtime_ns) for name, status in found if not name.startswith(".")))

    def activity(self) -> tuple[object, ...]:
        """Return a value that changes whenever a worker writes output, metrics or a checkpoint."""
        found = [*self._folder.entries(LOGS), *self._folder.entries()]
        sizes = [(name, status.st_size) for name, status in found if stat.S_ISREG(status.st_mode)]
        return (*sorted(sizes), *self.saved())

    def fence(self, generation: int, over: bool = False) -> None:
        """Keep workers older than `generation` from starting and saving; with `over`, also its own from starting."""
        grant_access(str(self.paths.shared))  # which a worker may have taken away
        self._folder.write(self.paths.fence.name, f"{generation}{' over' * over}\n")
