"""Bounded reading of lines from a growing file with untrusted content; skips holes."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from typing import BinaryIO

from orchestrate.node.trees import data

MAX_LINE = 1 << 20  # bytes of a line; longer lines are split
CHUNK = 1 << 20  # bytes per read
BREAK = re.compile(rb"\r*\n|\r")
BLOCK = 1 << 16  # bytes in which lines are counted at a time, or read as long as there is time


class Lines:
    """The state of reading one file."""

    def __init__(self, split: Callable[[bytes], int] = len) -> None:
        """`split` returns the length of the first part of a line that is too long."""
        self.split = split
        self.cut = False  # whether `offset` is within a line whose beginning was skipped
        self.offset = 0
        self.partial = b""  # an incomplete line
        self.start = 0  # offset of that line
        self.begin = 0  # offset of what was returned last

    def skip(self, file: BinaryIO, last: int) -> None:
        """Skip to the first line that begins within the last `last` bytes of the file."""
        self.offset = max(0, os.fstat(file.fileno()).st_size - last - 1)
        if self.offset or not last:
            text = os.pread(file.fileno(), last + 1, self.offset)  # a line may have ended before
            at = first_whole(text)
            self.cut = at < 0 < len(text)
            self.offset += len(text) if at < 0 else at

    def tail(self, file: BinaryIO, lines: int, most: int) -> None:
        """Skip to the last `lines` lines, or one more, within about the last `most` bytes of the file."""
        at = size = os.fstat(file.fileno()).st_size
        newlines = lines + 1  # the last line ends with one
        while at > max(0, size - most):
            at, end = max(0, at - BLOCK), at
            block = os.pread(file.fileno(), end - at, at)
            if (found := block.count(b"\n")) >= newlines:
                self.offset = at + len(block.rsplit(b"\n", newlines)[0]) + 1
                return
            newlines -= found
        self.skip(file, size - at)

    def near_end(self, file: BinaryIO, most: int) -> None:
        """Start again if the file was truncated, and skip what is more than `most` bytes before its end."""
        behind = os.fstat(file.fileno()).st_size - self.offset
        if behind < 0:
            self.offset, self.partial, self.cut, behind = 0, b"", False, behind + self.offset
        if behind > most:
            self.partial = b""
            self.skip(file, most)

    def new(self, file: BinaryIO, most: float = float("inf")) -> Iterator[bytes]:
        """Yield the lines since the last call, without line breaks, from about `most` bytes of the file."""
        for lines in self.blocks(file, most):
            for line in lines.split(b"\n"):
                yield line
                self.begin += len(line) + 1

    def blocks(self, file: BinaryIO, most: float = float("inf")) -> Iterator[bytes]:
        """Yield the lines since the last call, many at a time, without the line break of the last one.

        What is written meanwhile is left to the next call: it could go on forever.
        """
        most = min(most, os.fstat(file.fileno()).st_size - self.offset)
        while most > 0:
            self.offset, chunk = data(file, self.offset, int(min(CHUNK, most)))
            if not chunk:
                return
            begin, self.offset, most = self.offset, self.offset + len(chunk), most - len(chunk)
            if self.cut:
                if (at := first_whole(chunk)) < 0:
                    continue
                begin, chunk, self.cut = begin + at, chunk[at:], False
            if not self.partial:
                self.start = begin
            if (end := chunk.rfind(b"\n")) < 0:
                self.partial += chunk
            else:
                lines, self.partial = self.partial + chunk[:end], chunk[end + 1 :]
                del chunk  # so that there are not two copies
                self.begin, self.start = self.start, self.offset - len(self.partial)
                yield lines
            if len(self.partial) >= MAX_LINE:
                at = self.split(self.partial)
                part, self.partial = self.partial[:at], self.partial[at:]
                self.begin, self.start = self.start, self.start + at
                yield part

    def new_while(self, goes_on: Callable[[], bool], file: BinaryIO) -> Iterator[bytes]:
        """Yield new lines as long as `goes_on()`, which is asked every 64 KiB."""
        begun = -1
        while begun < self.offset and goes_on():
            begun = self.offset
            yield from self.new(file, BLOCK)

    def rest(self) -> bytes:
        """Return an incomplete last line."""
        rest, self.partial = self.partial, b""
        self.begin, self.start = self.start, self.offset
        return rest


def first_whole(text: bytes) -> int:
    """Return where the first line begins whose beginning is in a text that may begin within one; -1 if there is none.

    A carriage return begins one, too: it is that of a progress bar.
    """
    found = BREAK.search(text)
    return -1 if not found else found.start() if found[0] == b"\r" else found.end()


def last(file: BinaryIO, most: int, lines: int = sys.maxsize, split: Callable[[bytes], int] = len) -> Iterator[bytes]:
    """Yield the lines that begin within the last `most` bytes of a file, which may end within a line.

    If there are many more than `lines`, yield only about that many: a line can take a single byte. `split` is as for
    `Lines`.
    """
    end = at = os.fstat(file.fileno()).st_size
    while at > max(0, end - most) and lines < sys.maxsize:
        at = max(0, at - BLOCK)
        lines -= os.pread(file.fileno(), BLOCK, at).count(b"\n")
        if lines < 0:
            most = end - at
    read = Lines(split)
    read.skip(file, most)
    yield from read.new(file, most)
    yield read.rest()
