"""Regular expressions from a job file, searched for in a process of their own.

Python's `re` may backtrack for years, and cannot be interrupted meanwhile. The kernel ends that process when its
processor time is over, also where the one that has started it is gone.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable

TAKES = 2  # seconds of processor time for one search, with the start of its process
WAITS = 60.0  # seconds after which a process that gets no processor is ended
SEARCH = """
import json, re, resource, sys
resource.setrlimit(resource.RLIMIT_CPU, (int(sys.argv[1]),) * 2)
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
sys.stdout.write(str(bool(re.search(*json.load(sys.stdin)))))
"""


class Patterns:
    """Searches texts for patterns; one that takes too long is not found, then and later, and is reported once."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._found: dict[tuple[str, str], bool] = {}
        self._slow: set[str] = set()

    def search(self, pattern: str, text: str) -> bool:
        """Whether a pattern is found anywhere in a text."""
        if (pattern, text) not in self._found and pattern not in self._slow:
            answer = _answer(pattern, text)
            if answer is None:
                self._slow.add(pattern)
                self._warn(f"the rule with log {ascii(pattern[:60])} is ignored: the search takes more than {TAKES} s")
            else:
                self._found[pattern, text] = answer
        return self._found.get((pattern, text), False)


def _answer(pattern: str, text: str) -> bool | None:
    """Whether a pattern is found in a text; None where the search has not come to its end."""
    command = [sys.executable, "-I", "-S", "-c", SEARCH, str(TAKES)]
    given = json.dumps([pattern, text])
    try:  # in a session of its own, where Ctrl-C does not reach it
        done = subprocess.run(
            command, input=given, capture_output=True, text=True, timeout=WAITS, start_new_session=True
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return {"True": True, "False": False}.get(done.stdout)
