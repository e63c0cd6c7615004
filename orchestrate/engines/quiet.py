"""Output of installers and builds: shown as progress while they run, and printed only if they fail."""

from __future__ import annotations

import logging
import re
from collections import deque
from typing import IO

from orchestrate.console import phase, print_message, progress

log = logging.getLogger(__name__)

SHOWN_LINES = 50  # of the output of a command that fails
INTERNAL = "[internal]"  # steps of BuildKit's own
STEP = re.compile(r"#\d+ (?:\d+\.\d+ )?")  # BuildKit's number and time of a line


def follow(output: IO[str]) -> deque[str]:
    """Read the output of a command to its end, showing the current line; return the last lines."""
    last: deque[str] = deque(maxlen=SHOWN_LINES)
    for line in output:
        log.debug("%s", line.rstrip())
        text = STEP.sub("", line).strip()
        if text and not text.startswith(INTERNAL):
            last.append(line.rstrip())
            progress(text, print_message)
    phase("")
    return last
