"""Time as a value: what counts seconds is passed a clock, so that tests can pass one that they advance."""

from __future__ import annotations

import time
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
