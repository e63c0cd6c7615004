"""What is kept of the metrics that a job writes: as much as a report needs, however much there is. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from orchestrate.job.recorder import objects

MAX_LINE = 32 << 10  # bytes of a line, enough for a number of each of 1000 ranks; a longer one does not count
LARGE, WORD, NAMES = 1 << 63, 1000, 1000  # of a number; of a text, in characters; of names, and of a value's parts
DEEP = 3  # levels of lists and mappings
ROOM = 250_000  # numbers of all rows together
PACE = "rank_seconds"  # the name of a row: the seconds that each rank took for itself in a step


def measurements(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """The objects of lines, one at a time: as data, JSON takes up to fifty times its bytes."""
    return (values for line in lines if len(line) <= MAX_LINE for values in objects([line]))


def fold(lines: Iterable[bytes]) -> list[dict[str, Any]]:
    """The last rows of the workers' pace, and after them the last value of each other name."""
    final: dict[str, Any] = {}
    rows: deque[list[Any]] = deque()
    room = ROOM
    for values in measurements(lines):
        for name, value in values.items():
            if not plain(name) or not plain(value):
                continue
            if name != PACE or not isinstance(value, list):
                final[name] = value
            else:
                rows.append(value)
                room -= len(value) + 1
        while room < 0:
            room += len(rows.popleft()) + 1
        while len(final) > NAMES + 1:  # so that the report knows that it leaves some out
            del final[next(iter(final))]
    return [*({PACE: row} for row in rows), *([final] if final else [])]


def plain(value: Any) -> bool:
    """Whether a value is a number, a word, or a few of these; a job writes what it likes."""
    waiting, room = [(value, DEEP)], NAMES
    while waiting:
        value, depth = waiting.pop()
        if isinstance(value, dict):
            if not all(len(name) <= WORD for name in value):
                return False
            value = list(value.values())
        if isinstance(value, list):
            room -= len(value)
            if not depth or room < 0:
                return False
            waiting += ((one, depth - 1) for one in value)
        elif isinstance(value, str):
            if len(value) > WORD:
                return False
        elif value is not None and abs(value) >= LARGE:
            return False
    return True
