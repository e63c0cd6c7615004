"""The steps that a job has taken, and the time that it has lost meanwhile, from lines of metrics.jsonl. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from orchestrate.record.metrics import PACE, SAVING, is_number

SHORT = 60.0  # seconds of a job below which its goodput says little: most of the time is its start
LARGEST = 1e15  # numbers from here on do not count


@dataclass
class Steps:
    """The steps of a job, also those that it repeated after restarts."""

    generations: int = 1  # steps go back only when workers are restarted; there may be several writers, however
    numbered: bool = False  # whether there are steps; otherwise, lines are counted
    done: int = 0  # steps, repeated ones included
    repeated: int = 0
    restarts: int = 0  # that repeated steps
    latest: int = 0  # steps since the last of these
    first: float = 0.0  # step
    last: float | None = None  # step
    saving: float = 0.0  # seconds
    waiting: float = 0.0  # seconds that a worker waited for the slowest one, as a mean over the workers
    paced: int = 0  # steps done when `rank_seconds` was last reported

    def record(self, values: dict[str, Any]) -> float:
        """Record a line of metrics.jsonl, of which only plain numbers count; return its step."""
        step = values.get("step")
        self.numbered = self.numbered or is_small(step)
        at = float(step) if step is not None and is_small(step) else (self.last or 0.0) + (not self.numbered)
        if self.last is None:
            self.first, self.last = at, at - 1  # the job may have begun with a checkpoint
        if self.first <= at < self.last and self.restarts + 1 < self.generations:
            self.go_back(at)
        if at >= self.last:
            steps = int(at - self.last)
            self.done, self.latest, self.last = self.done + steps, self.latest + steps, at
        self._lose(values.get(SAVING), values.get(PACE))
        return at

    def go_back(self, at: float) -> None:
        """Count the steps from one on as repeated."""
        assert self.last is not None
        self.repeated += int(self.last - at) + 1
        self.restarts, self.latest, self.last = self.restarts + 1, 0, at - 1

    def _lose(self, saving: Any, pace: Any) -> None:
        """Add the time that was spent on saving, and on waiting for the slowest worker."""
        if is_small(saving) and saving > 0:
            self.saving += saving
        if isinstance(pace, list) and pace and all(map(is_small, pace)):
            self.waiting += max(0, self.done - self.paced) * (max(pace) - sum(pace) / len(pace))
            self.paced = self.done

    def divided(self, working: float) -> dict[str, float]:
        """Divide the seconds for which the script ran by what they were spent on."""
        part = min(1.0, self.repeated / max(1, self.done))
        left = working * (1 - part)
        saving = min(self.saving * (1 - part), left)
        waiting = min(self.waiting * (1 - part), left - saving)
        return {"steps": left - saving - waiting, "saving": saving, "waiting": waiting, "repeated": working * part}


def is_small(value: Any) -> bool:
    """Whether a value is a number of a size that can be a step, a time or a metric."""
    return is_number(value) and abs(value) < LARGEST
