"""Output of installers and builds: shown as progress while they run, and printed only if they fail."""

from __future__ import annotations

import codecs
import contextlib
import io
import logging
import os
import re
import selectors
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

from orchestrate.console import phase, print_message, progress
from orchestrate.errors import ResourceError

log = logging.getLogger(__name__)

TIMEOUT = 2 * 3600.0  # seconds: packages may be compiled, and a package's own program may never end
MAX_LINE = 1 << 16  # characters of a line; longer ones are split
LINGER = 2.0  # seconds in which the output must end after its process
SHOWN_LINES = 50  # of the output of a command that fails
INTERNAL = "[internal]"  # steps of BuildKit's own
STEP = re.compile(r"(#\d+) (?:\d+\.\d+ )?")  # BuildKit's number of a step, and the time of a line
RULE = "------"  # around the output of the step that failed, which BuildKit prints again at the end
UNREACHABLE = re.compile(
    r"[Nn]ame resolution|new connection|[Cc]onnection (?:refused|reset|timed out|broken)|Network is unreachable"
    r"|Read timed out|Max retries exceeded|TLS handshake timeout|no such host"
)
HANGS = "check the packages: the program that builds one may wait"
UNTRUSTED = "CERTIFICATE_VERIFY_FAILED"
NO_NETWORK = "no connection: try BUILD_NETWORK=host (orchestrate help image)"
NO_TRUST = (
    "the server's certificate is not trusted: behind a proxy that re-signs TLS, CA_BUNDLE=FILE (orchestrate help image)"
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


def follow(process: subprocess.Popen[str], hide: Callable[[str], str]) -> deque[str]:
    """Read the output of a command, the leader of a process group, showing the current line; return the last lines.

    `hide` masks secrets in each line. Ctrl-C ends the group. Raises ResourceError if the command does not end in time.
    """
    last: deque[str] = deque(maxlen=SHOWN_LINES)
    internal: set[str] = set()
    late = threading.Event()

    def give_up() -> None:
        late.set()  # first: the output ends with the process
        _end(process, signal.SIGKILL)

    timer = threading.Timer(TIMEOUT, give_up)
    timer.daemon = True
    timer.start()
    try:
        for line in map(hide, _lines(process)):
            log.debug("%s", line.rstrip())
            step, text = STEP.match(line), STEP.sub("", line).strip()
            if step and text.startswith(INTERNAL):
                internal.add(step[1])
            if text and not (step and step[1] in internal):
                last.append(line.rstrip())
                progress(text, print_message)
    except BaseException:
        _end(process, signal.SIGTERM)
        raise
    finally:
        phase("")
        timer.cancel()
    if late.is_set():
        raise ResourceError(f"the installation did not end within {TIMEOUT / 3600:g} h", HANGS)
    return last


def _lines(process: subprocess.Popen[str]) -> Iterator[str]:
    """Yield the lines of its output until it ends, or soon after the process has: others may keep the output open."""
    assert process.stdout
    output, rest, over = process.stdout.fileno(), "", float("inf")
    decode = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8")("replace"), translate=True).decode
    with selectors.DefaultSelector() as selector:
        selector.register(output, selectors.EVENT_READ)
        while time.monotonic() < over:
            if over == float("inf") and process.poll() is not None:
                over = time.monotonic() + LINGER
            if not selector.select(LINGER / 4):
                continue
            piece = os.read(output, MAX_LINE)
            *lines, rest = f"{rest}{decode(piece, not piece)}".split("\n")
            yield from lines
            if not piece or len(rest) > MAX_LINE:
                yield rest
                rest = ""
            if not piece:
                return


def _end(process: subprocess.Popen[str], how: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, how)
