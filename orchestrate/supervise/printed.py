"""The metrics in the output of workers, for the report: numbers that change, or that are among the last ones."""

from __future__ import annotations

import math
from dataclasses import dataclass

from orchestrate.record.progress import Progress

MAX_NAMES = 100  # metrics that are kept, the last ones
LAST = 5  # last lines with metrics in which a number counts that has never changed, such as the final accuracy


@dataclass
class _Number:
    value: float
    line: int  # the last one with it, of those with metrics
    changed: bool = False


class Printed:
    """What workers have printed of their progress so far; a dump of the settings is not part of it."""

    def __init__(self) -> None:
        self.step = 0  # the highest one; those of bars, which start again in each epoch, do not count
        self.lines = 0
        self.numbers: dict[str, _Number] = {}

    def record(self, found: Progress) -> None:
        """Record the progress in a line."""
        metrics = dict(found.metrics)
        if (step := found.of_job) is not None:
            self.step = max(self.step, step)
            metrics["step"] = step
        self.lines += bool(metrics)
        for name, value in metrics.items():
            if math.isfinite(value):
                before = self.numbers.pop(name, None)
                changed = before is not None and (before.changed or before.value != value)
                self.numbers[name] = _Number(value, self.lines, changed)
        while len(self.numbers) > MAX_NAMES:
            del self.numbers[next(iter(self.numbers))]

    def metrics(self) -> dict[str, float]:
        """Return the last value of each metric."""
        return {
            name: number.value
            for name, number in self.numbers.items()
            if number.changed or number.line > self.lines - LAST
        }
