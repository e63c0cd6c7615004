"""What a job leaves in its run directory while it runs: signs of life, of progress, and last words."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from orchestrate import logs
from orchestrate.events import parse
from orchestrate.paths import JobPaths, open_regular, write_whole

WORDS = 12  # lines of a worker that failed which a person sees


class Traces:
    """The supervisor's eyes on the files of a job, and its fence."""

    def __init__(self, paths: JobPaths) -> None:
        self.paths = paths
        self.generation = 0  # whose last words are asked for
        self._step, self._read, self._partial = 0, 0, b""

    def words(self, rank: int) -> list[str]:
        """The last lines of a worker of this generation."""
        return logs.last_words(self.text(rank), self.generation, WORDS)

    def text(self, rank: int) -> str:
        """The end of a worker's log."""
        return logs.tail(self.paths.log(rank))

    def log(self, rank: int) -> Path:
        """Where a worker's log is."""
        return self.paths.log(rank)

    def step(self) -> int:
        """The highest `step` of metrics.jsonl; 0 where there is none."""
        with contextlib.suppress(OSError), open_regular(self.paths.metrics) as file:
            if os.fstat(file.fileno()).st_size < self._read:  # the script has begun anew
                self._read, self._partial = 0, b""
            file.seek(self._read)
            data = file.read()
            self._read += len(data)
            lines, _, self._partial = (self._partial + data).rpartition(b"\n")
            steps = (values.get("step") for values in parse(lines))
            self._step = max([self._step, *(step for step in steps if isinstance(step, int))])
        return self._step

    def saved(self) -> tuple[object, ...]:
        """What stands in the folder of checkpoints, with times of change; it differs after a save."""
        found: list[tuple[str, int]] = []
        with contextlib.suppress(OSError):
            for entry in os.scandir(self.paths.checkpoints):
                if not entry.name.startswith("."):
                    with contextlib.suppress(OSError):
                        found.append((entry.name, entry.stat(follow_symlinks=False).st_mtime_ns))
        return tuple(sorted(found))

    def activity(self) -> tuple[object, ...]:
        """Differs whenever a worker has written output, metrics or a checkpoint."""
        found: list[tuple[str, int]] = []
        for folder in (self.paths.logs, self.paths.root):
            with contextlib.suppress(OSError):
                for entry in os.scandir(folder):
                    with contextlib.suppress(OSError):
                        ours = entry.name in (self.paths.events.name, self.paths.supervisor_log.name)
                        if not ours and entry.is_file(follow_symlinks=False):
                            found.append((entry.path, entry.stat(follow_symlinks=False).st_size))
        return (*sorted(found), *self.saved())

    def fence(self, generation: int, over: bool = False) -> None:
        """From now on no worker older than `generation` may start or save; `over`: nor one of it start."""
        write_whole(self.paths.fence, f"{generation}{' over' * over}\n")
