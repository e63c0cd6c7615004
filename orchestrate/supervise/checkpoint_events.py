"""Notes when workers save checkpoints, for those who watch the job and for its report."""

from __future__ import annotations

from orchestrate.record.events import CheckpointSaved
from orchestrate.supervise.context import JobContext

INTERVAL, MAX_LOAD = 1.0, 0.02  # seconds between two looks at the folder, at least; of a core
QUIET, LONGEST = 2.0, 10.0  # seconds without a change after which a save is complete; after which it is noted anyway
SPACING = 500  # the time between two events is at least this part of the generation's


class Saves:
    """Compares the checkpoints folder with what it was."""

    def __init__(self, job: JobContext) -> None:
        self.job = job
        self.first = self.last = job.files.saved()
        self.began = self.noted = self.due = self.job.clock.monotonic()
        self.changed: tuple[float, float] | None = None  # when a save began to change the folder, and when it last did

    @property
    def happened(self) -> bool:
        """Whether the folder has changed in this generation."""
        return self.last != self.first

    def step(self) -> None:
        """Look at the folder, unless that was just done; emit an event for a save that is complete."""
        now = self.job.clock.monotonic()
        if now < self.due:
            return
        self._look(now)
        self.due = now + max(INTERVAL, (self.job.clock.monotonic() - now) / MAX_LOAD)
        if self.changed and now >= self.noted + (now - self.began) / SPACING:
            began, last = self.changed
            if now >= min(last + QUIET, began + LONGEST):
                self._note(now)

    def end(self) -> None:
        """Look at the folder once all workers have ended."""
        self._look(self.job.clock.monotonic())
        if self.changed:
            self._note(self.job.clock.monotonic())

    def _look(self, now: float) -> None:
        before, self.last = dict(self.last), self.job.files.saved()
        if any(before.get(name) != modified for name, modified in self.last):  # removing old ones is no save
            self.changed = (self.changed[0] if self.changed else now), now

    def _note(self, now: float) -> None:
        self.changed, self.noted = None, now
        self.job.emit(CheckpointSaved())
