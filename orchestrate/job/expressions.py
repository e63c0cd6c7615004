"""Regular expressions of a job file, compiled and searched for in a process of its own; see `bounded.py`."""

from __future__ import annotations

import re
import signal
import time

WRONG = (re.error, RecursionError, OverflowError, MemoryError)
MIN_CPU_SECONDS = 0.1  # seconds of processor time with which a search is started


def flaw(patterns: list[str]) -> str:
    """Why the first pattern that is no regular expression is none; empty where all are."""
    for pattern in patterns:
        try:
            re.compile(pattern)
        except WRONG as error:
            return str(error) or type(error).__name__
    return ""


def found(patterns: list[str], text: str, seconds: float) -> tuple[list[bool | None], float]:
    """Whether each pattern is found in a text, None for one that takes too long; and the processor time of all.

    They have `seconds` together, and each at most half of what is left, so that one cannot keep others from theirs;
    when less than MIN_CPU_SECONDS is left, the others have no answer.
    """
    signal.signal(signal.SIGPROF, _out_of_time)
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
    except (*WRONG, TimeoutError):
        return None


def _out_of_time(*_: object) -> None:
    raise TimeoutError
