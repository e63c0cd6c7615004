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
STEP = re.compile(r"(#\d+) (?:\d+\.\d+ )?")  # BuildKit's number of a step, and the time of a line
RULE = "------"  # around the output of the step that failed, which BuildKit prints again at the end
UNREACHABLE = re.compile(
    r"[Nn]ame resolution|new connection|[Cc]onnection (?:refused|reset|timed out|broken)|Network is unreachable"
    r"|Read timed out|Max retries exceeded|TLS handshake timeout|no such host"
)
UNTRUSTED = "CERTIFICATE_VERIFY_FAILED"
NO_NETWORK = "no connection: try BUILD_NETWORK=host (README, The image)"
NO_TRUST = (
    "the server's certificate is not trusted: behind a proxy that re-signs TLS, CA_BUNDLE=FILE (README, The image)"
)


def advice(output: str) -> str:
    """Return a hint if a command that failed could not connect, or did not trust a server; empty otherwise."""
    return NO_TRUST if UNTRUSTED in output else NO_NETWORK if UNREACHABLE.search(output) else ""


def essence(output: str) -> str:
    """Return what a failed command has printed, of a build only the output of the step that failed."""
    parts = output.split(f"\n{RULE}\n")
    if len(parts) < 3:
        return output
    lines = [re.sub(r"^\d+\.\d+ ", "", line) for line in parts[-2].splitlines() if not line.startswith(" > ")]
    return "\n".join(lines) or output


def follow(output: IO[str]) -> deque[str]:
    """Read the output of a command to its end, showing the current line; return the last lines."""
    last: deque[str] = deque(maxlen=SHOWN_LINES)
    internal: set[str] = set()
    for line in output:
        log.debug("%s", line.rstrip())
        step, text = STEP.match(line), STEP.sub("", line).strip()
        if step and text.startswith(INTERNAL):
            internal.add(step[1])
        if text and not (step and step[1] in internal):
            last.append(line.rstrip())
            progress(text, print_message)
    phase("")
    return last
