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
        self.job_step = 0  # the highest step that is said to be the job's
        self.any_step = 0  # the highest one in other lines and bars
        self.before, self.per_epoch = 0, False  # the step of the line before, and whether they do
        self.lines = 0
        self.numbers: dict[str, _Number] = {}

    @property
    def step(self) -> int:
        """The highest step of the job; that of other lines only if they have no epochs, in which it starts again."""
        return self.job_step or (0 if self.per_epoch else self.any_step)

    def begin(self) -> None:
        """Expect the lines of a new generation, which may repeat steps."""
        self.before = 0

    def record(self, found: Progress) -> None:
        """Record the progress in a line."""
        metrics = dict(found.metrics)
        if (step := found.of_job) is not None:
            self.job_step = max(self.job_step, step)
            metrics["step"] = step
        elif found.step is not None:
            self.per_epoch |= found.epoch is not None or "epoch" in metrics or found.step < self.before
            self.before, self.any_step = found.step, max(self.any_step, found.step)
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
