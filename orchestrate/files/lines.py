"""The lines of a file that grows, and that a job may have filled with anything: bounded, past holes, piece by piece."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import BinaryIO

from orchestrate.node.trees import data

MAX_LINE = 1 << 20  # bytes of a line; a longer one comes in pieces
CHUNK = 1 << 20  # bytes that are read at once


class Lines:
    """What has been read of one file."""

    def __init__(self) -> None:
        self.offset = 0
        self.partial = b""  # a line without its end

    def skip(self, file: BinaryIO, last: int) -> None:
        """Go to the first line that begins within the `last` bytes of the file."""
        start = max(0, os.fstat(file.fileno()).st_size - last)
        self.offset = start + (os.pread(file.fileno(), last, start).find(b"\n") + 1 if start else 0)

    def new(self, file: BinaryIO, most: float = float("inf")) -> Iterator[bytes]:
        """The lines since the last call, without their ends; of about `most` bytes of the file."""
        while most > 0:
            self.offset, chunk = data(file, self.offset, CHUNK)
            if not chunk:
                return
            self.offset += len(chunk)
            most -= len(chunk)
            *lines, self.partial = (self.partial + chunk).split(b"\n")
            yield from lines
            if len(self.partial) >= MAX_LINE:
                yield self.rest()

    def rest(self) -> bytes:
        """A last line that has no end."""
        rest, self.partial = self.partial, b""
        return rest
