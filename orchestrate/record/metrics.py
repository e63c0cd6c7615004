"""Reduce the metrics that a job writes to what its report needs, in bounded memory. Pure."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, TypeGuard

from orchestrate.record.recorder import objects

MAX_METRICS = 64 << 20  # last bytes of metrics.jsonl that are read at the end
MAX_ROWS = 100_000  # last lines of it
MAX_LINE = 32 << 10  # bytes of a line, enough for a number from each of 1000 ranks; longer lines are ignored
MAX_NUMBER, MAX_TEXT, NAMES = 1 << 63, 1000, 1000  # limits: numbers; characters of text; names, and items of a value
MAX_DEPTH = 3  # levels of nested lists and mappings
ROOM = 250_000  # numbers in all rows together
# Names of metrics with a meaning of their own.
PACE = "rank_seconds"  # for each rank, the seconds of its own work in a step
SAVING = "save_seconds"  # the seconds for which the workers waited for a checkpoint to be saved
TOTAL = "total_steps"  # the steps of the whole job
SPECIAL = (PACE, SAVING, TOTAL)
FIRST = ("loss", "acc")  # what is shown first is the metric whose name contains these
NOT_FINITE = ("NaN", "Infinity", "-Infinity")


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a value is a finite number of a reasonable size."""
    return type(value) in (int, float) and abs(value) < MAX_NUMBER  # which excludes NaN as well


def shown(values: Any) -> dict[str, Any]:
    """The metrics that are shown to users: all but the special ones, as far as `values` are metrics at all."""
    found = values.items() if isinstance(values, dict) else ()
    return {name: value for name, value in found if name not in SPECIAL and plain(name) and plain(value)}


def place(name: str) -> int:
    """The importance of a metric: 0 for a loss, 1 for an accuracy, 2 for others."""
    words = re.split(r"[\W_]+", name.lower())  # of `train_loss` or `eval/accuracy`
    return next((at for at, first in enumerate(FIRST) if any(word.startswith(first) for word in words)), len(FIRST))


def listed(values: dict[str, Any]) -> list[str]:
    """The numbers among some metrics as text, such as `loss 0.25`, the most important ones first."""
    return [
        f"{name} {value if value in NOT_FINITE else format(value, '.4g')}"
        for name, value in sorted(strict(values).items(), key=lambda item: place(item[0]))
        if type(value) in (int, float) or value in NOT_FINITE
    ]


def strict(value: Any) -> Any:
    """A plain value as JSON can hold it: other numbers become the text that Protocol Buffers use for them."""
    if isinstance(value, dict):
        return {name: strict(one) for name, one in value.items()}
    if isinstance(value, list):
        return [strict(one) for one in value]
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def measurements(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Parse lines one at a time: parsed JSON takes up to fifty times its size."""
    return (values for line in lines if len(line) <= MAX_LINE for values in objects([line]))


def fold(lines: Iterable[bytes]) -> list[dict[str, Any]]:
    """The last rows of `rank_seconds`, followed by the last value of each other name."""
    final: dict[str, Any] = {}
    rows: deque[list[Any]] = deque()
    room = ROOM
    for values in measurements(lines):
        for name, value in values.items():
            if not plain(name) or not plain(value):
                continue
            if name != PACE or not isinstance(value, list):
                final[name] = value
            elif all(map(is_number, value)):
                rows.append(value)
                room -= len(value) + 1
        while room < 0:
            room += len(rows.popleft()) + 1
        while len(final) > NAMES + 1:  # one more than a report lists, so that it can report that some are missing
            del final[next(iter(final))]
    return [*({PACE: row} for row in rows), *([final] if final else [])]


def plain(value: Any) -> bool:
    """Whether a value is a number, a short text, or a small collection of these; a job may write anything."""
    waiting, room = [(value, MAX_DEPTH)], NAMES
    while waiting:
        value, depth = waiting.pop()
        if isinstance(value, dict):
            if not all(len(name) <= MAX_TEXT for name in value):
                return False
            value = list(value.values())
        if isinstance(value, list):
            room -= len(value)
            if not depth or room < 0:
                return False
            waiting += ((one, depth - 1) for one in value)
        elif isinstance(value, str):
            if len(value) > MAX_TEXT:
                return False
        elif value is not None and abs(value) >= MAX_NUMBER and value not in (math.inf, -math.inf):
            return False
    return True
