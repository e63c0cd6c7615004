"""Detect a hang, and find the worker that the others wait for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from orchestrate.record import debugging
from orchestrate.supervise.context import JobContext
from orchestrate.supervise.diagnosis.tracebacks import before_dump, ends_with_error
from orchestrate.supervise.stacks import Position, position, processes

IDLE = 0.05  # share of a core; a worker that waits for its peers uses less, although torch polls
STATES = {
    "T": "is stopped (SIGSTOP)",
    "t": "is stopped by a debugger",
    "D": "waits for disk or network file system I/O",
}
FROZEN = ("T", "t")
MAX_PLACES = 3  # of child processes that are named
STUCK = "failed, but its threads or child processes kept it from exiting"  # a worker for which `has_failed`


def has_failed(log: str, stand: Position | None) -> bool:
    """Whether a script has ended with an error: its traceback is the last output, and its code does not run anymore.

    Python then waits for threads or child processes before it exits.
    """
    return ends_with_error(before_dump(log.rstrip().splitlines())) and (stand is None or not stand.own)


def late(states: Mapping[int, str], stands: Mapping[int, Position | None]) -> tuple[int, str]:
    """Return the rank that the others wait for, and a description of its state.

    `states` are letters of proc(5). It is the first stopped worker; otherwise the first outside a collective while
    others are in one; otherwise the one whose position fewest workers share.
    """
    for rank, state in sorted(states.items()):
        if state in FROZEN:
            return rank, f"{STATES[state]}{_others(stands, rank)}"
    known = {rank: stand for rank, stand in sorted(stands.items()) if stand}
    if not known:
        rank = min(states, default=0)
        return rank, STATES.get(states.get(rank, ""), "is idle and printed no stack")
    outside = [rank for rank, stand in known.items() if not stand.waits]
    if outside and len(outside) < len(known):
        rank = outside[0]
        return rank, f"never arrived: it is at {known[rank].where}{_others(stands, rank)}"
    silent = [rank for rank in sorted(states) if rank not in known]
    if silent and not outside:
        what = STATES.get(states[silent[0]], "does not respond and printed no stack")
        return silent[0], f"never arrived: it {what}{_others(stands, silent[0])}"
    places = Counter(stand.where for stand in known.values())
    rank = min(known, key=lambda r: (places[known[r].where], r))
    if len(places) > 1:
        return rank, f"is not where the others are, but at {known[rank].where}{_others(stands, rank)}"
    return rank, f"{'and all others are' if len(known) > 1 else 'is'} at {known[rank].where}"


def _others(stands: Mapping[int, Position | None], rank: int) -> str:
    places = Counter(stand.where for other, stand in stands.items() if stand and other != rank)
    return "".join(
        f"; {count} {'others wait' if count > 1 else 'other waits'} at {at}" for at, count in places.most_common(2)
    )


def child(stacks: str) -> str:
    """Return, as the end of a sentence, where child processes are, from the stacks of a worker; empty without one."""
    found = [*dict.fromkeys(place.where for place in map(position, processes(stacks)[1]) if place)][:MAX_PLACES]
    return f"; {'child processes' if found[1:] else 'a child process'} of it: at {' and '.join(found)}" if found else ""


class HangDetector:
    """Detects hangs: nothing was written for `hang_after`, and no worker used the CPU in the second half of it."""

    def __init__(self, job: JobContext, limit: float) -> None:
        """`limit` is `hang_after` in seconds."""
        self.files, self.job, self.clock, self.limit = job.files, job, job.clock, limit
        self.checked = self.active = self.polled = self.clock.monotonic()
        self.activity: object = None
        self.cpu: dict[int, float] = {}  # CPU seconds by rank at the last poll of the nodes

    def hung(self, excused: bool) -> bool:
        """Whether the job was idle for too long; time in which it is `excused` does not count."""
        now = self.clock.monotonic()
        if now - self.checked < min(1.0, self.limit / 20):
            return False
        self.checked = now
        activity = self.files.activity()
        if excused or debugging.now(self.files.paths) or activity != self.activity:
            self.activity, self.active, self.cpu = activity, now, {}
        if now - self.active < self.limit / 2 or now - self.polled < self.limit / 10:
            return False  # polling the nodes is not free
        before, elapsed = self.cpu, now - self.polled
        self.cpu = {rank: doing.cpu for rank, doing in self.job.session.activity().items()}
        self.polled = now
        if any(seconds - before.get(rank, seconds) > IDLE * elapsed for rank, seconds in self.cpu.items()):
            self.active, self.cpu = now, {}
        return bool(before and self.cpu) and now - self.active > self.limit
