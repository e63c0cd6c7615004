"""events.jsonl: the events of a job, one per line, in order. Another supervisor continues from this file.

Each line ends with `mac`, an HMAC of the line and the one before, which only this account can compute; so a file that
came with a project is not trusted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from orchestrate.clock import SYSTEM, Clock
from orchestrate.files.folder import MAX_FILE, content
from orchestrate.node.messages import checks
from orchestrate.record.events import VERSION, Event, JobEnded, JobResumed, SupervisorStarted, from_line, to_line

E = TypeVar("E", bound=Event)
# Bytes of a record after which it takes no more lines of workers, and after which a job should not go on.
MAX_LINES, FULL = MAX_FILE // 4, MAX_FILE // 8 * 7


def objects(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Parse the JSON objects in lines; anything else, such as the partial line of a killed process, is skipped."""
    for line in lines:
        if line.lstrip()[:1] == b"{":  # an error for each of many other lines takes long
            with contextlib.suppress(ValueError, RecursionError):
                yield json.loads(line)


def read(content: bytes, key: bytes | None = b"") -> tuple[list[Event], str]:
    """Parse a file: return its events, and the last one's `mac`, which is empty without a key.

    With None as the key, events are not verified, and may only be displayed. Events with unknown names are left out.
    Raises ValueError for an event that is damaged or was not written with the key in this order, and for a file of a
    newer version, or with too many values.
    """
    checks.limit_values(content, 5 * checks.MAX_VALUES)
    lines = (line for line in objects(io.BytesIO(content)) if isinstance(line.get("event"), str))
    found, last = [], ""
    for count, line in enumerate(lines, 1):
        mac, last = line.pop("mac", ""), _mac(key or b"", last, line)
        if mac != last and key is not None:
            raise ValueError(f"event {count}, {line['event']!r}, was not written by this job")
        try:
            found.append(from_line(line))
        except ValueError as error:
            raise ValueError(f"event {count}, {line['event']!r}, is damaged: {error}") from None
    if found and isinstance(found[0], SupervisorStarted) and found[0].version > VERSION:
        raise ValueError(f"it has version {found[0].version}, but this orchestrate reads version {VERSION}")
    return [event for event in found if event], last


def _mac(key: bytes, before: str, line: dict[str, Any]) -> str:
    """HMAC-SHA256 (RFC 2104), truncated to 128 bits, of an event and the `mac` before it; empty without a key."""
    return hmac.digest(key, f"{before}{json.dumps(line)}".encode(), "sha256")[:16].hex() if key else ""


def _elapsed(events: list[Event], clock: Clock) -> float:
    """Seconds since the start of a job with these events."""
    if not events or isinstance(events[-1], JobEnded):
        return events[-1].seconds if events else 0.0
    start = next((event for event in reversed(events) if isinstance(event, JobResumed | SupervisorStarted)), events[0])
    if isinstance(start, SupervisorStarted) and start.boot and start.boot == boot():
        passed = clock.monotonic() - start.monotonic
    else:
        passed = clock.time() - start.time
    return max(events[-1].seconds, start.seconds + passed)


def boot() -> str:
    """Return what identifies the start of this machine's kernel; empty if that is unknown."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


class Recorder:
    """Records the events of a job, in memory and in a file; continues an existing file."""

    def __init__(
        self,
        path: Path,
        show: Callable[[Event], None] = lambda _: None,
        hide: Callable[[dict[str, Any]], dict[str, Any]] = dict,
        key: bytes = b"",
        clock: Clock = SYSTEM,
    ) -> None:
        """`show` is called with each new event; `hide` removes secrets from one; `key` authenticates the lines.
        `clock` is that of the job, for everyone who waits or counts seconds in it.

        Raises ValueError for a file that is damaged, or was written with another key or none.
        """
        before = b""
        with contextlib.suppress(FileNotFoundError):
            before = content(path).encode()
        self.size = len(before)  # bytes
        self.events, self._mac = read(before, key)
        self._show, self._hide, self._key, self.clock = show, hide, key, clock
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        self._unwritten: list[bytes] = []
        self._started = clock.monotonic() - _elapsed(self.events, clock)
        if before and not before.endswith(b"\n"):
            self._unwritten.append(b"\n")

    def __call__(self, event: E) -> E:
        """Record an event; return it with the wall-clock time and the seconds since the job's start."""
        stamped = dataclasses.replace(event, time=round(self.clock.time(), 3), seconds=self.seconds())
        line = self._hide(to_line(stamped))
        if self.size > MAX_LINES and isinstance(cause := line.get("cause"), dict):
            cause["last_lines"] = []  # otherwise, the record could become too large to be read
        recorded = from_line(line)
        assert isinstance(recorded, type(event))
        self.events.append(recorded)
        self._mac = _mac(self._key, self._mac, line)
        self._unwritten.append(json.dumps({**line, "mac": self._mac} if self._mac else line).encode() + b"\n")
        self.size += len(self._unwritten[-1])
        with contextlib.suppress(OSError):  # for example, the disk is full; the lines are written with the next event
            while self._unwritten:
                written = os.write(self._file, self._unwritten[0])
                self._unwritten[0] = self._unwritten[0][written:]
                if not self._unwritten[0]:
                    del self._unwritten[0]
        self._show(recorded)
        return recorded

    @property
    def full(self) -> bool:
        """Whether the file will soon be too large to be read."""
        return self.size > FULL

    def seconds(self) -> float:
        """Seconds since the job's start, without those between its end and a resumption."""
        return round(self.clock.monotonic() - self._started, 3)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)
