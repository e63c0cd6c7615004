"""A node's stdout: a copy of the workers' output for `docker logs`. A slow reader misses lines; no worker waits.

The complete output is in each worker's log file. Stdout is a pipe to the engine, which stops reading while its daemon
is down; a worker that had to wait for it would block, and with it the whole gang.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time

MAX_BUFFERED = 4 << 20  # bytes that are buffered for a slow reader
LAST_FLUSH_TIMEOUT = 2.0  # seconds to flush the buffer when the node ends


class Stdout:
    """Writes without blocking, if stdout is a pipe."""

    def __init__(self, descriptor: int = 1) -> None:
        self.descriptor = descriptor
        self.waiting = bytearray()
        self.dropped = 0  # number of lines
        self.began = False

    def _begin(self) -> None:
        """Make a pipe non-blocking; only at the first write, since other programs also import this module."""
        self.began = True
        with contextlib.suppress(OSError):
            if stat.S_ISFIFO(os.fstat(self.descriptor).st_mode):
                os.set_blocking(self.descriptor, False)

    def write(self, data: bytes) -> None:
        """Write whole lines; drop and count them if the buffer is full."""
        if not self.began:
            self._begin()
        if len(self.waiting) > MAX_BUFFERED:
            self.dropped += data.count(b"\n")
            return
        if self.dropped:
            self.waiting += f"[node] {self.dropped} lines are missing here: the reader was too slow\n".encode()
            self.dropped = 0
        self.waiting += data
        self.flush()

    def flush(self, last: bool = False) -> bool:
        """Write what can be written now (`last`: within a short time); return whether some is left."""
        deadline = time.monotonic() + LAST_FLUSH_TIMEOUT
        while self.waiting:
            try:
                del self.waiting[: os.write(self.descriptor, self.waiting[: 1 << 16])]
            except BlockingIOError:
                if not last or time.monotonic() > deadline:
                    break
                time.sleep(0.01)
            except OSError:  # the reader has gone
                self.waiting.clear()
        return bool(self.waiting)


stdout = Stdout()


def print_message(text: str) -> None:
    """Print a message of the node itself."""
    stdout.write(f"[node] {text}\n".encode(errors="backslashreplace"))
