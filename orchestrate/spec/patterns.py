"""Regular expressions of a job file, whose searches end in time.

They are searched with the package `regex`: unlike in `re`, whose searches may backtrack for years, a search has a time
limit.
"""

from __future__ import annotations

import functools
import math
import re
import time
from collections.abc import Callable, Collection
from typing import Any

MAX_SECONDS = 2.0  # for all searches of one decision
MIN_SECONDS = 0.1  # that must be left to start a search
# `regex` copies what is repeated when it compiles `(?:x{90}){90}`, and up to 1 KiB of memory is used for each of the
# characters then. All patterns of a key together may have as many as this; `size` never counts too few.
MAX_SIZE = 200_000
ONE = re.compile(r"[\w.]\{\s*([0-9]+)")  # a character, repeated
SET = re.compile(r"\]\{\s*([0-9]+)")  # a set of characters, repeated
REPEATED = re.compile(r"(?<![\w.\]])(?:\{\s*([0-9]+)|\+)")  # a group, or anything else, repeated
LIMIT = f"the limit for all rules together is {MAX_SECONDS:g} s"


class Patterns:
    """Searches for patterns; one that takes too long is reported once, and counts as not found from then on."""

    def __init__(self, patterns: Collection[str], warn: Callable[[str], None], seconds: float = MAX_SECONDS) -> None:
        """Search for all `patterns` together, when the first is needed; `warn` reports those that are ignored.

        `seconds` is the time limit of all searches for one decision.
        """
        self._patterns, self._warn, self._seconds = patterns, warn, seconds
        self._found: dict[tuple[str, str], bool] = {}
        self._slow: set[str] = set()
        self._left = seconds

    def renew(self) -> None:
        """Reset the time limit, for a new decision."""
        self._left = self._seconds

    def search(self, pattern: str, text: str) -> bool:
        """Whether one of the patterns is found in a text."""
        if (pattern, text) not in self._found and pattern not in self._slow and self._left >= MIN_SECONDS:
            self._search_all(text)
        return self._found.get((pattern, text), False)

    def _search_all(self, text: str) -> None:
        """Search for all patterns; each may take half of the time that is left, so that others have time, too."""
        waiting = [pattern for pattern in dict.fromkeys(self._patterns) if pattern not in self._slow]
        while waiting and self._left >= MIN_SECONDS:
            pattern, start = waiting.pop(0), time.thread_time()
            try:
                self._found[pattern, text] = bool(compiled(pattern).search(text, timeout=self._left / 2))
            except (TimeoutError, MemoryError):
                self._slow.add(pattern)
                self._warn(f"the rule with log {ascii(pattern[:60])} is ignored: the search takes too long ({LIMIT})")
            self._left -= time.thread_time() - start
        if waiting:
            why = f"no time is left ({LIMIT})"
            self._warn(f"{len(waiting)} of the rules with log are ignored for this failure: {why}")


@functools.lru_cache(maxsize=256)
def compiled(pattern: str) -> Any:
    """Compile a regular expression in the syntax of `re`; raises ValueError if it is invalid or repeats too often."""
    import regex  # only here: it takes time to import

    _check([pattern])
    try:
        return regex.compile(pattern, regex.VERSION0)
    except (regex.error, RecursionError, OverflowError, MemoryError) as error:
        raise ValueError(str(error) or type(error).__name__) from None


def size(pattern: str) -> int:
    """Return how many characters a pattern has at most, with its repetitions written out."""
    characters = len(pattern) + sum(map(int, ONE.findall(pattern)))
    characters += len(pattern) * sum(map(int, SET.findall(pattern)))  # a set may be most of the pattern
    return characters * math.prod(int(count or 1) + 1 for count in REPEATED.findall(pattern))


def _check(patterns: Collection[str]) -> None:
    if sum(map(size, patterns)) > MAX_SIZE:
        raise ValueError(f"with repetitions written out, its patterns have more than {MAX_SIZE:,} characters")


def flaw(patterns: tuple[str, ...], groups: int = 0) -> str:
    """Why patterns cannot be used: one is invalid or has fewer groups; empty if all can be used."""
    try:
        _check(patterns)
        for pattern in patterns:
            if compiled(pattern).groups < groups:
                return f"{pattern} has no group"
    except ValueError as error:
        return str(error)
    return ""
