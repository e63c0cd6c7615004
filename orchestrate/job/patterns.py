"""Search for the regular expressions of a job's rules, with a limit on CPU time.

Python's `re` may backtrack for years, and some short patterns take long to compile.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection

from orchestrate.files import bounded
from orchestrate.job import expressions

# Seconds of CPU time for all searches of one decision, or to compile the patterns of a job file.
MAX_CPU_SECONDS = 2
LIMIT = f"the limit for all rules together is {MAX_CPU_SECONDS} s of CPU time"


class Patterns:
    """Searches for patterns; one that takes too long is reported once, and counts as not found from then on."""

    def __init__(self, patterns: Collection[str], warn: Callable[[str], None]) -> None:
        """Search for all `patterns` together, when the first is needed; `warn` reports those that are ignored."""
        self._patterns, self._warn = patterns, warn
        self._found: dict[tuple[str, str], bool] = {}
        self._slow: set[str] = set()
        self._left = float(MAX_CPU_SECONDS)

    def renew(self) -> None:
        """Reset the time limit, for a new decision."""
        self._left = float(MAX_CPU_SECONDS)

    def search(self, pattern: str, text: str) -> bool:
        """Whether one of the patterns is found in a text."""
        if (
            (pattern, text) not in self._found
            and pattern not in self._slow
            and self._left >= expressions.MIN_CPU_SECONDS
        ):
            self._search_all(text)
        return self._found.get((pattern, text), False)

    def _search_all(self, text: str) -> None:
        wanted = [pattern for pattern in dict.fromkeys(self._patterns) if pattern not in self._slow]
        done = bounded.call(expressions.found, wanted, text, self._left, seconds=MAX_CPU_SECONDS + 1)
        answers, took = done or ([], self._left)
        self._left -= took
        for pattern, answer in zip(wanted, answers):
            if answer is None:
                self._slow.add(pattern)
                self._warn(f"the rule with log {ascii(pattern[:60])} is ignored: the search takes too long ({LIMIT})")
            else:
                self._found[pattern, text] = answer
        if skipped := len(wanted) - len(answers):
            self._warn(f"{skipped} of the rules with log are ignored for this failure: no time is left ({LIMIT})")


@functools.lru_cache(maxsize=8)  # a job file is checked key by key, and as a whole
def flaw(patterns: tuple[str, ...], groups: int = 0) -> str:
    """Why patterns cannot be used: one is invalid or has fewer groups, or compiling all takes too long; empty if not.

    Compiling takes place in a separate process with a time limit.
    """
    why = bounded.call(expressions.flaw, patterns, groups, seconds=MAX_CPU_SECONDS) if patterns else ""
    return f"compiling all of them takes more than {MAX_CPU_SECONDS} s; use simpler ones" if why is None else why
