"""Curves of the metrics that a job has written to metrics.jsonl. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from orchestrate.job.metrics import FIRST, PACE, SAVING, SPECIAL, is_number, place

MAX_CURVES = 12
MAX_VALUES = 200_000  # of each metric; then every second one is dropped
BUCKETS = 250  # parts of a curve, of each of which the lowest and highest value are drawn
LARGEST = 1e15  # numbers from here on are not drawn
MAX_NAME = 60  # characters

Curve = list[tuple[float, float]]  # steps and values


@dataclass
class Progress:
    """The metrics of a job by step."""

    generations: int = 1  # steps go back only when workers are restarted; there may be several writers, however
    curves: dict[str, Curve] = field(default_factory=dict)
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

    def add(self, values: dict[str, Any]) -> None:
        """Take a line of metrics.jsonl; only plain numbers count."""
        step = values.get("step")
        self.numbered = self.numbered or _number(step)
        at = float(step) if step is not None and _number(step) else (self.last or 0.0) + 1
        if self.last is None:
            self.first, self.last = at, at - 1  # the job may have begun with a checkpoint
        if self.first <= at < self.last and self.restarts + 1 < self.generations:
            self._go_back(at)
        if at >= self.last:
            steps = int(at - self.last)
            self.done, self.latest, self.last = self.done + steps, self.latest + steps, at
        self._lose(values)
        for name, value in values.items():
            if name in ("step", *SPECIAL) or not _number(value) or not 0 < len(name) <= MAX_NAME:
                continue
            if name in self.curves or len(self.curves) < MAX_CURVES:
                _append(self.curves.setdefault(name, []), (at, float(value)))

    def _lose(self, values: dict[str, Any]) -> None:
        """Add the time that was spent on saving, and on waiting for the slowest worker."""
        saving, pace = values.get(SAVING), values.get(PACE)
        if _number(saving) and saving > 0:
            self.saving += saving
        if isinstance(pace, list) and pace and all(map(_number, pace)):
            self.waiting += max(0, self.done - self.paced) * (max(pace) - sum(pace) / len(pace))
            self.paced = self.done

    def _go_back(self, at: float) -> None:
        """Forget what was done from a step on, which the job repeats after a restart."""
        assert self.last is not None
        self.repeated += int(self.last - at) + 1
        self.restarts, self.latest, self.last = self.restarts + 1, 0, at - 1
        for curve in self.curves.values():
            while curve and curve[-1][0] >= at:
                curve.pop()

    def drawn(self, hide: Callable[[str], str] = str) -> dict[str, Curve]:
        """Return the curves to draw: loss and accuracy first, with few points each.

        A single point is not drawn, nor is a constant that is neither a loss nor an accuracy.

        `hide` removes secrets from their names.
        """
        names = sorted(self.curves, key=lambda name: (place(name), name))
        return {hide(name): thinned(self.curves[name]) for name in names if self._worth_drawing(name)}

    def _worth_drawing(self, name: str) -> bool:
        curve = self.curves[name]
        return len(curve) > 1 and (place(name) < len(FIRST) or len({value for _, value in curve}) > 1)


def progress(rows: Iterable[dict[str, Any]], generations: int = 1) -> Progress:
    """Return the progress that lines of metrics.jsonl report."""
    found = Progress(generations)
    for values in rows:
        found.add(values)
    return found


def _append(curve: Curve, point: tuple[float, float]) -> None:
    """Add a point unless it is before the last one; it replaces one at the same step."""
    if curve and curve[-1][0] == point[0]:
        curve.pop()
    if not curve or curve[-1][0] < point[0]:
        curve.append(point)
    if len(curve) > MAX_VALUES:
        del curve[::2]


def thinned(curve: Curve) -> Curve:
    """Return a curve that looks the same with few points: the lowest and the highest one of each part."""
    if len(curve) <= 2 * BUCKETS:
        return curve
    size = math.ceil(len(curve) / BUCKETS)
    parts = (curve[start : start + size] for start in range(0, len(curve), size))
    ends = ({min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])} for part in parts)
    return [point for points in ends for point in sorted(points)]


def _number(value: Any) -> TypeGuard[float]:
    return is_number(value) and abs(value) < LARGEST
