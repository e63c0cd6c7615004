"""Time as a value: what counts seconds is passed a clock, so that tests can pass one that they advance."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol


class Clock(Protocol):
    """A source of time with the functions of the module `time`, in seconds."""

    def time(self) -> float:
        """Seconds since 1970."""

    def monotonic(self) -> float:
        """Seconds of a clock that never goes back."""

    def sleep(self, seconds: float, /) -> None:
        """Wait."""


SYSTEM: Clock = time


def wait_until(done: Callable[[], object], seconds: float, clock: Clock, every: float = 0.02) -> bool:
    """Call `done` at intervals of `every` seconds until it is true, for up to `seconds`; return whether it was."""
    deadline = clock.monotonic() + seconds
    while not done():
        if clock.monotonic() >= deadline:
            return False
        clock.sleep(every)
    return True


class Stall:
    """Tells when something has not moved for too long."""

    def __init__(self, clock: Clock, seconds: float, least: int = 1) -> None:
        """It moves as long as its count grows by `least` within `seconds`."""
        self.clock, self.seconds, self.least = clock, seconds, least
        self.count, self.since = 0, clock.monotonic()

    def seen(self, count: int) -> bool:
        """Record the count; return whether it has stalled."""
        now = self.clock.monotonic()
        if count >= self.count + self.least:
            self.count, self.since = count, now
        return now - self.since > self.seconds
