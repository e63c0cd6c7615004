"""Files of a running job, as its supervisor reads them: activity, progress, and last lines of workers."""

from __future__ import annotations

import contextlib
import os
import stat
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from orchestrate.files.folder import Folder
from orchestrate.files.lines import Lines
from orchestrate.files.paths import CHECKPOINTS, LOGS, METRICS, JobPaths
from orchestrate.job import logs
from orchestrate.job.metrics import MAX_LINE, fold, measurements

LAST_LINES, MAX_WIDTH = 12, 2000  # lines of a failed worker that are reported, and characters of each
MAX_METRICS_READ = 8 << 20  # bytes of metrics.jsonl per read
MAX_METRICS, MAX_ROWS = 64 << 20, 100_000  # last bytes and lines of metrics.jsonl that go into the report


class JobFiles:
    """Reads the files of a job for its supervisor, and writes the fence."""

    def __init__(self, paths: JobPaths, hide: Callable[[str], str] = str) -> None:
        """`hide` removes secrets from worker output."""
        self.paths, self.hide = paths, hide
        self.generation = 0  # the generation that `last_lines` reads
        self._step, self._metrics = 0, Lines()

    @property
    def _folder(self) -> Folder:
        return self.paths.folder

    def gone(self) -> bool:
        """Whether the run directory was removed; nodes cannot do that."""
        return not os.path.lexists(self.paths.shared)

    def last_lines(self, rank: int) -> list[str]:
        """Return the last lines of a worker in this generation, truncated, since events store them permanently."""
        lines = logs.last_lines(self.text(rank), self.generation, LAST_LINES)
        return [line if len(line) <= MAX_WIDTH else f"{line[: MAX_WIDTH - 1]}…" for line in lines]

    def text(self, rank: int) -> str:
        """Return the end of a worker's log."""
        return self.hide(logs.tail(self._folder, rank))

    def log(self, rank: int) -> Path:
        """Return the path of a worker's log."""
        return self.paths.log(rank)

    def step(self) -> int:
        """Return the highest `step` in metrics.jsonl, or 0."""
        with contextlib.suppress(OSError), self._folder.open(METRICS) as file:
            if file.seek(0, 2) < self._metrics.offset:  # the script has truncated the file
                self._metrics = Lines()
            found = measurements(self._metrics.new(file, MAX_METRICS_READ))
            steps = (step for values in found if type(step := values.get("step")) is int and 0 <= step < 1 << 63)
            self._step = max([self._step, *steps])
        return self._step

    def metrics(self) -> list[dict[str, Any]]:
        """Return the rows of metrics.jsonl for the report, only the last ones if there are too many."""
        with contextlib.suppress(OSError), self._folder.open(METRICS) as file:
            read = Lines()
            read.skip(file, MAX_METRICS)
            last = deque((line for line in read.new(file, MAX_METRICS) if len(line) <= MAX_LINE), MAX_ROWS)
            return fold([*last, read.rest()])
        return []

    def checkpoints(self) -> tuple[list[Path], bool]:
        """Return the checkpoint files, and whether the list is complete."""
        found, whole = self._folder.files(CHECKPOINTS)
        return [self.paths.root / path for path in found], whole

    def saved(self) -> tuple[object, ...]:
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
        self._folder.write(self.paths.fence.name, f"{generation}{' over' * over}\n")
