"""Compile and search for regular expressions of a job file, in a separate process; see `bounded.py`."""

from __future__ import annotations

import re
import signal
import time

REGEX_ERRORS = (re.error, RecursionError, OverflowError, MemoryError)
MIN_CPU_SECONDS = 0.1  # seconds of CPU time that must be left to start a search


def flaw(patterns: list[str], groups: int) -> str:
    """Error of the first pattern that is not a valid regular expression with so many groups; empty if all are."""
    for pattern in patterns:
        try:
            if re.compile(pattern).groups < groups:
                return f"{pattern} has no group"
        except REGEX_ERRORS as error:
            return str(error) or type(error).__name__
    return ""


def found(patterns: list[str], text: str, seconds: float) -> tuple[list[bool | None], float]:
    """Return whether each pattern is found in a text (None if the search takes too long), and the CPU time used.

    All searches together may take `seconds`, and each at most half of the time left, so that one cannot starve the
    others. When less than MIN_CPU_SECONDS is left, the remaining patterns have no result.
    """
    signal.signal(signal.SIGPROF, _raise_timeout)
    answers: list[bool | None] = []
    for pattern in patterns:
        left = seconds - time.process_time()
        if left < MIN_CPU_SECONDS:
            break
        answers.append(_is_found(pattern, text, left / 2))
    return answers, time.process_time()


def _is_found(pattern: str, text: str, seconds: float) -> bool | None:
    try:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            return bool(re.search(pattern, text))
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    except (*REGEX_ERRORS, TimeoutError):
        return None


def _raise_timeout(*_: object) -> None:
    raise TimeoutError
