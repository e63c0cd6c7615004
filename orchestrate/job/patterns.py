"""The regular expressions of a job's rules, searched for with a limit on processor time.

Python's `re` may backtrack for years, and takes long to compile some short patterns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection

from orchestrate.files import bounded
from orchestrate.job import expressions

# Seconds of processor time: of all searches for one decision, or to compile the patterns of a job file.
MAX_CPU_SECONDS = 2
ALL = f"the searches of all rules together have {MAX_CPU_SECONDS} s of processor time"


class Patterns:
    """Searches texts for patterns; one that takes too long is not found, then and later, and is reported once."""

    def __init__(self, patterns: Collection[str], warn: Callable[[str], None]) -> None:
        """`patterns` are searched for together, when the first of them is asked for."""
        self._patterns, self._warn = patterns, warn
        self._found: dict[tuple[str, str], bool] = {}
        self._slow: set[str] = set()
        self._left = float(MAX_CPU_SECONDS)

    def renew(self) -> None:
        """Make the time for searches that of a new decision."""
        self._left = float(MAX_CPU_SECONDS)

    def search(self, pattern: str, text: str) -> bool:
        """Whether one of the patterns is found anywhere in a text."""
        if (
            (pattern, text) not in self._found
            and pattern not in self._slow
            and self._left >= expressions.MIN_CPU_SECONDS
        ):
            self._look(text)
        return self._found.get((pattern, text), False)

    def _look(self, text: str) -> None:
        wanted = [pattern for pattern in dict.fromkeys(self._patterns) if pattern not in self._slow]
        done = bounded.call(expressions.found, wanted, text, self._left, seconds=MAX_CPU_SECONDS + 1)
        answers, took = done or ([], self._left)
        self._left -= took
        for pattern, answer in zip(wanted, answers):
            if answer is None:
                self._slow.add(pattern)
                self._warn(f"the rule with log {ascii(pattern[:60])} is ignored: its search takes too long ({ALL})")
            else:
                self._found[pattern, text] = answer
        if late := len(wanted) - len(answers):
            self._warn(f"rules with log are ignored for this failure: no time is left for {late} of them ({ALL})")


@functools.lru_cache(maxsize=8)  # a job file is checked key by key, and as a whole
def flaw(patterns: tuple[str, ...]) -> str:
    """Why patterns cannot be used: one is no regular expression, or all take too long to compile; empty if they can."""
    why = bounded.call(expressions.flaw, patterns, seconds=MAX_CPU_SECONDS) if patterns else ""
    return (
        f"takes more than {MAX_CPU_SECONDS} s to compile, with those of all rules; use simpler ones"
        if why is None
        else why
    )
