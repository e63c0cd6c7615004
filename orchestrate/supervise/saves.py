"""Notes when workers save checkpoints, for those who watch the job and for its report."""

from __future__ import annotations

import time

from orchestrate.job.events import CheckpointSaved
from orchestrate.supervise.running import Running

INTERVAL = 1.0  # seconds between two looks at the folder; a save that changes it in both is not yet complete
MAX_EVENTS = 1000  # of one generation


class Saves:
    """Compares the checkpoints folder with what it was."""

    def __init__(self, job: Running) -> None:
        self.job = job
        self.first = self.noted = self.last = job.files.saved()
        self.due, self.count = 0.0, 0

    @property
    def any(self) -> bool:
        """Whether a checkpoint was saved in this generation, as far as is known."""
        return self.last != self.first

    def step(self) -> None:
        """Look at the folder once a second; emit an event for what has changed and is now complete."""
        if time.monotonic() < self.due:
            return
        self.due = time.monotonic() + INTERVAL
        found = self.job.files.saved()
        if found == self.last:
            self._note()
        self.last = found

    def end(self) -> None:
        """Look at the folder once all workers have ended."""
        self.last = self.job.files.saved()
        self._note()

    def _note(self) -> None:
        if self.last and self.last != self.noted and self.count < MAX_EVENTS:
            self.count += 1
            self.job.emit(CheckpointSaved())
        self.noted = self.last
