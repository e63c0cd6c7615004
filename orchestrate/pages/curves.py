"""Curves of the metrics that a job has written to metrics.jsonl. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from orchestrate.record.metrics import SPECIAL, place
from orchestrate.record.steps import Steps, is_small

MAX_CURVES, MAX_NAMES = 12, 100  # that are drawn, and that are read
MAX_VALUES = 200_000  # of a metric; then every second one is dropped
MAX_POINTS = 1_000_000  # of all metrics, about: a curve without new values is not thinned
BUCKETS = 250  # parts of a curve, of each of which the lowest and highest value are drawn
MAX_NAME = 60  # characters

Curve = list[tuple[float, float]]  # steps and values
SPLITS = {"train", "training", "test", "testing", "val", "valid", "validation", "eval", "evaluation", "dev"}
# Of which a curve shows nothing that its last value does not.
COUNTERS = {"epoch", "epochs", "sample", "samples", "token", "tokens", "iteration", "iter", "seconds", "elapsed"}


def quantity(name: str) -> str:
    """Return what a metric measures, without the part of the data: `loss` for `train_loss` and `eval/loss`."""
    words = [word for word in re.split(r"[\W_]+", name.lower()) if word]
    return "_".join(word for word in words if word not in SPLITS) or name


@dataclass
class Progress(Steps):
    """The metrics of a job by step."""

    curves: dict[str, Curve] = field(default_factory=dict)

    def add(self, values: dict[str, Any]) -> None:
        """Record a line of metrics.jsonl; only plain numbers count."""
        at = self.record(values)
        for name, value in values.items():
            if name in ("step", *SPECIAL) or not is_small(value) or not 0 < len(name) <= MAX_NAME:
                continue
            if name in self.curves or len(self.curves) < MAX_NAMES:
                curve = self.curves.setdefault(name, [])
                _append(curve, (at, float(value)), min(MAX_VALUES, MAX_POINTS // len(self.curves)))

    def go_back(self, at: float) -> None:
        """Forget what was done from a step on, which the job repeats after a restart."""
        super().go_back(at)
        for curve in self.curves.values():
            while curve and curve[-1][0] >= at:
                curve.pop()

    def drawn(self, hide: Callable[[str], str] = str) -> dict[str, Curve]:
        """Return the curves to draw: loss and accuracy first, with few points each, and none with a single one.

        `hide` removes secrets from their names.
        """
        names = sorted(self.curves, key=lambda name: (place(name), name))
        several = [name for name in names if len(self.curves[name]) > 1]
        return {hide(name): thinned(self.curves[name]) for name in several[:MAX_CURVES]}


def progress(rows: Iterable[dict[str, Any]], generations: int = 1) -> Progress:
    """Return the progress that lines of metrics.jsonl report."""
    found = Progress(generations)
    for values in rows:
        found.add(values)
    return found


def _append(curve: Curve, point: tuple[float, float], most: int) -> None:
    """Add a point unless it is before the last one; it replaces one at the same step."""
    if curve and curve[-1][0] == point[0]:
        curve.pop()
    if not curve or curve[-1][0] < point[0]:
        curve.append(point)
    if len(curve) > most:
        del curve[1::2]  # neither the first nor the last one


def thinned(curve: Curve) -> Curve:
    """Return a curve that looks the same with few points: the lowest and the highest one of each part."""
    if len(curve) <= 2 * BUCKETS:
        return curve
    size = math.ceil(len(curve) / BUCKETS)
    parts = (curve[start : start + size] for start in range(0, len(curve), size))
    ends = ({min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])} for part in parts)
    return [point for points in ends for point in sorted(points)]
