"""What a job leaves in its folder while it runs: signs of life, of progress, and last words."""

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

WORDS, WIDEST = 12, 2000  # lines of a worker that failed which a person sees, and their characters
MAX_METRICS_READ = 8 << 20  # bytes of the metrics that one look takes in
MAX_METRICS, MAX_ROWS = 64 << 20, 100_000  # bytes and lines of the metrics that a report is made of: the last ones


class JobFiles:
    """The supervisor's eyes on the files of a job, and its fence."""

    def __init__(self, paths: JobPaths, hide: Callable[[str], str] = str) -> None:
        """`hide` takes secrets out of what workers have written."""
        self.paths, self.hide = paths, hide
        self.generation = 0  # whose last words are asked for
        self._step, self._metrics = 0, Lines()

    @property
    def _folder(self) -> Folder:
        return self.paths.folder

    def gone(self) -> bool:
        """Whether the run directory was removed; nodes cannot do that."""
        return not os.path.lexists(self.paths.shared)

    def last_lines(self, rank: int) -> list[str]:
        """The last lines of a worker of this generation, each cut to what a person reads; events keep them for good."""
        words = logs.last_words(self.text(rank), self.generation, WORDS)
        return [line if len(line) <= WIDEST else f"{line[: WIDEST - 1]}…" for line in words]

    def text(self, rank: int) -> str:
        """The end of a worker's log."""
        return self.hide(logs.tail(self._folder, rank))

    def log(self, rank: int) -> Path:
        """Where a worker's log is."""
        return self.paths.log(rank)

    def step(self) -> int:
        """The highest `step` of metrics.jsonl; 0 where there is none."""
        with contextlib.suppress(OSError), self._folder.open(METRICS) as file:
            if file.seek(0, 2) < self._metrics.offset:  # the script has begun anew
                self._metrics = Lines()
            found = measurements(self._metrics.new(file, MAX_METRICS_READ))
            steps = (step for values in found if type(step := values.get("step")) is int and 0 <= step < 1 << 63)
            self._step = max([self._step, *steps])
        return self._step

    def metrics(self) -> list[dict[str, Any]]:
        """What is kept of the lines of metrics.jsonl, the last ones where they are many."""
        with contextlib.suppress(OSError), self._folder.open(METRICS) as file:
            read = Lines()
            read.skip(file, MAX_METRICS)
            last = deque((line for line in read.new(file, MAX_METRICS) if len(line) <= MAX_LINE), MAX_ROWS)
            return fold([*last, read.rest()])
        return []

    def checkpoints(self) -> tuple[list[Path], bool]:
        """The files that the script has saved, and whether these are all."""
        found, whole = self._folder.files(CHECKPOINTS)
        return [self.paths.root / path for path in found], whole

    def saved(self) -> tuple[object, ...]:
        """What is in the folder of checkpoints, with times of change; it differs after a save."""
        found = self._folder.entries(CHECKPOINTS)
        return tuple(sorted((name, status.st_mtime_ns) for name, status in found if not name.startswith(".")))

    def activity(self) -> tuple[object, ...]:
        """Differs whenever a worker has written output, metrics or a checkpoint."""
        found = [*self._folder.entries(LOGS), *self._folder.entries()]
        sizes = [(name, status.st_size) for name, status in found if stat.S_ISREG(status.st_mode)]
        return (*sorted(sizes), *self.saved())

    def fence(self, generation: int, over: bool = False) -> None:
        """From now on no worker older than `generation` may start or save; `over`: nor one of it start."""
        self._folder.write(self.paths.fence.name, f"{generation}{' over' * over}\n")
