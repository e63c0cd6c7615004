"""When the lines of logs were written, as far as a supervisor knows: the times at which it had read how much of each.

A worker's log has no times, and its file is in the hands of the job; so a supervisor notes them in times.jsonl, while
it shows the output.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

from orchestrate.clock import SYSTEM, Clock
from orchestrate.files.folder import regular, replacing_links
from orchestrate.files.lines import last
from orchestrate.host import records
from orchestrate.record.recorder import objects

# Seconds between two notes, by the size of the file: a job of many talkative workers adds at most some 10 MB a day.
INTERVALS = ((4 << 20, 0.25), (16 << 20, 2.0), (64 << 20, 30.0))
RANK = re.compile("[0-9]{1,7}")
MAX_TIME = 1e11  # seconds since 1970
MAX_READ, MAX_NOTES = 64 << 20, 1_000_000  # last bytes of the file, and notes of all ranks: of more, some are left out


class TimesWriter:
    """Notes how much of each log has been read, and when."""

    def __init__(self, path: Path, clock: Clock = SYSTEM) -> None:
        """Continue the file, which need not exist."""
        self.path, self.clock, self.noted, self.last = path, clock, dict[int, int](), 0.0
        with contextlib.suppress(OSError):
            self.size = os.lstat(path).st_size
            return
        self.size = 0

    def note(self, offsets: Mapping[int, int], end: bool = False) -> None:
        """Note the logs that have grown, if the last note is long enough ago, or at the `end`; raises OSError."""
        grown = {rank: offset for rank, offset in offsets.items() if offset != self.noted.get(rank, 0)}
        interval = next((seconds for size, seconds in INTERVALS if self.size < size), 0.0)
        if not grown or not interval or (self.clock.monotonic() < self.last + interval and not end):
            return
        line = json.dumps({"time": round(self.clock.time(), 2), "read": grown}).encode() + b"\n"
        with records.pinned(self.path.parent) as run, open(run / self.path.name, "ab", opener=replacing_links) as file:
            file.write(line)
        self.noted |= grown
        self.size, self.last = self.size + len(line), self.clock.monotonic()


class Times:
    """When the lines of a job's logs were read; to be asked for the lines of a rank in their order."""

    def __init__(self, path: Path | None = None, ranks: int = 0) -> None:
        """Read the file for that many ranks; without one, no times are known."""
        self.notes: dict[int, list[tuple[int, float]]] = {}  # by rank: offsets and times, the last ones first
        self.count, self.gap = 0, 0.0  # of all; seconds between two of a rank
        with contextlib.suppress(OSError), regular(path or "") as file:
            for row in (row for line in last(file, MAX_READ) for row in objects([line])):
                when, read = row.get("time"), row.get("read")
                if type(when) is float and 0 < when < MAX_TIME and isinstance(read, dict):
                    for rank, offset in read.items():
                        if RANK.fullmatch(rank) and int(rank) < ranks and type(offset) is int:
                            self._add(int(rank), offset, when)
        for notes in self.notes.values():
            notes.reverse()

    def _add(self, rank: int, offset: int, when: float) -> None:
        notes = self.notes.setdefault(rank, [])
        if not notes or (offset > notes[-1][0] and when >= notes[-1][1] + self.gap):
            notes.append((offset, when))
            self.count += 1
        while self.count > MAX_NOTES and self.gap < MAX_TIME:
            self.gap = max(2 * self.gap, INTERVALS[0][1])
            self.notes = {rank: _thinned(known, self.gap) for rank, known in self.notes.items()}
            self.count = sum(map(len, self.notes.values()))

    def at(self, rank: int, offset: int) -> float | None:
        """Return the time, in seconds since 1970, at which the line that begins at `offset` had been read."""
        notes = self.notes.get(rank, [])
        while notes and notes[-1][0] <= offset:
            notes.pop()
        return notes[-1][1] if notes else None


def _thinned(notes: list[tuple[int, float]], gap: float) -> list[tuple[int, float]]:
    """Return the notes that are at least so many seconds after the one before."""
    found = notes[:1]
    for note in notes:
        if note[1] >= found[-1][1] + gap:
            found.append(note)
    return found
