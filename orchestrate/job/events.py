"""events.jsonl: what happened to a job, a line each, in order. Also what a second supervisor goes on from.

Each line ends with `mac`, which only this account can make, of the line and of the one before: a file that came with
a project is not believed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import json
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from orchestrate.files.folder import regular
from orchestrate.files.forms import Form, each, fits, number, numbered, one_of, seconds, sequence, text, truth
from orchestrate.job.outcomes import JOB_OUTCOMES, Cause, GenerationResult, Outcome, Reason

Event = dict[str, Any]
Emit = Callable[..., None]  # emit(event, **data)
ANY: Form = {"event": text, "time": seconds, "seconds": seconds}
COUNT = number(1 << 31)
OURS = ("event", "outcome", "word", "cause", "node", "job_id", "engine")  # keys whose text only we choose
CAUSE: Form = {
    **dict.fromkeys(("node", "summary", "hint", "log"), text),
    "cause": one_of([*Reason]),
    **dict.fromkeys(("rank", "exit_code"), COUNT),
    "last_lines": sequence(text),
}
FORMS: dict[str, Form] = {  # of the events that a second supervisor goes on from
    "generation_starting": {"generation": COUNT},
    "nodes_up": {"hosts": each(text)},
    "worker_ended": {"rank": COUNT, "exit_code": COUNT, "stopping": truth, "known": one_of(["", *Reason])},
    "workers_stopping": {"why": text},
    "hang": {"states": numbered(text)},
    "generation_ended": {
        "generation": COUNT,
        "word": one_of([*Outcome]),
        "why": text,
        "cause": lambda value: value is None or fits(value, CAUSE),
        "time": seconds,
        "lasted": seconds,
        "step": number(1 << 63),
        "progress": truth,
    },
    "outcome": {"outcome": one_of(JOB_OUTCOMES), "reason": text},
}


def objects(lines: Iterable[bytes]) -> list[dict[str, Any]]:
    """The JSON objects of lines; anything else, such as half a line of a process that was killed, does not count."""
    found = []
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError):
            found.append(json.loads(line))
    return [value for value in found if isinstance(value, dict)]


def read(content: bytes, key: bytes = b"") -> tuple[list[Event], str]:
    """The events in the lines of a file, and the last one's `mac`, which is empty without a key.

    Raises ValueError for an event that has not the form of its name, or was not written with the key in this order.
    """
    events = [event for event in objects(content.splitlines()) if text(event.get("event"))]
    last = ""
    for count, event in enumerate(events, 1):
        mac, last = event.pop("mac", ""), _mac(key, last, event)
        if mac != last:
            raise ValueError(f"event {count}, {event['event']!r}, was not written by this job")
        if not fits(event, ANY | FORMS.get(event["event"], {})):
            raise ValueError(f"event {count}, {event['event']!r}, is not as we write it")
    return events, last


def _mac(key: bytes, before: str, event: Event) -> str:
    """HMAC-SHA256 (RFC 2104), cut to 128 bits, of an event and of the `mac` before it; empty without a key."""
    return hmac.digest(key, f"{before}{json.dumps(event)}".encode(), "sha256")[:16].hex() if key else ""


class Recorder:
    """Keeps the events of a job, in memory and as lines of a file; goes on where an earlier one ended."""

    def __init__(
        self,
        path: Path,
        show: Callable[[Event], None] = lambda _: None,
        hide: Callable[[Event], Event] = dict,
        key: bytes = b"",
    ) -> None:
        """`show` gets each new event, too; `hide` takes secrets out of one; `key` proves that the lines are ours.

        Raises ValueError for a file that is damaged, or that another key, or none, has written.
        """
        content = b""
        with contextlib.suppress(FileNotFoundError), regular(path) as file:
            content = file.read()
        self.events, self._mac = read(content, key)
        self._show, self._hide, self._key = show, hide, key
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        self._unwritten: list[bytes] = []
        passed = max(0.0, time.time() - self.events[0]["time"]) if self.events else 0.0
        self._started = time.monotonic() - passed
        if content and not content.endswith(b"\n"):
            self._unwritten.append(b"\n")

    def __call__(self, event: str, **data: Any) -> None:
        """Note `event`, with the wall clock's time and the seconds since the job's start."""
        line = {"event": event, "time": round(time.time(), 3), "seconds": self.seconds(), **self._hide(data)}
        self.events.append(line)
        self._mac = _mac(self._key, self._mac, line)
        self._unwritten.append(json.dumps({**line, "mac": self._mac} if self._mac else line).encode() + b"\n")
        with contextlib.suppress(OSError):  # the disk is full, say; they are written with the next event
            while self._unwritten:
                written = os.write(self._file, self._unwritten[0])
                self._unwritten[0] = self._unwritten[0][written:]
                if not self._unwritten[0]:
                    del self._unwritten[0]
        self._show(line)

    def seconds(self) -> float:
        """Since the job's start."""
        return round(time.monotonic() - self._started, 3)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


class History:
    """What the events say of a job so far."""

    def __init__(self, events: Iterable[Event]) -> None:
        self.ended: list[GenerationResult] = []  # the generations that are over
        self.running = -1  # the generation whose workers were started last, if it is not over
        self.exits: list[Event] = []  # what is known of its workers' ends
        self.stopping = ""  # why its workers were asked to end
        self.states: dict[int, str] = {}  # of its workers, as letters of proc(5), where it hung
        self.hosts: dict[str, str] = {}  # the machines of its nodes, where there are several
        self.outcome: tuple[Outcome, str] | None = None  # word and why, once it was decided
        for event in events:
            self._add(event)

    @property
    def furthest(self) -> int:
        """The highest step that a generation has come to."""
        return max((ended.step for ended in self.ended), default=0)

    def _add(self, event: Event) -> None:
        name = event["event"]
        if name == "generation_starting":
            self.running, self.exits, self.stopping, self.states = event["generation"], [], "", {}
        elif name == "nodes_up":
            self.hosts = event["hosts"]
        elif name == "worker_ended":
            self.exits.append(event)
        elif name == "workers_stopping":
            self.stopping = self.stopping or event["why"]
        elif name == "hang":
            self.states = {int(rank): state for rank, state in event["states"].items()}
        elif name == "generation_ended":
            self.running = -1
            values = {field.name: event[field.name] for field in dataclasses.fields(GenerationResult)}
            values["word"] = Outcome(values["word"])
            if cause := values["cause"]:
                values["cause"] = Cause(**{name: cause[name] for name in CAUSE} | {"cause": Reason(cause["cause"])})
            self.ended.append(GenerationResult(**values))
        elif name == "outcome":
            self.outcome = Outcome(event["outcome"]), event["reason"]
