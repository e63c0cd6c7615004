"""Worker output for a person's eyes: read from the per-rank files, a rank before each line, safe for a terminal."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from orchestrate.paths import JobPaths, open_regular

CHUNK = 1 << 20  # bytes
_ESCAPES = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # colours, cursor
    r"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?"  # window title, clipboard
    r"|\x1b[@-Z\\-_]?|[\x00-\x08\x0b-\x1f\x7f-\x9f]"
)


def clean(line: bytes) -> str:
    """A line as text: what a progress bar drew last, without anything that would steer the terminal."""
    text = line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")
    return _ESCAPES.sub("", text)


class Follower:
    """Hands out the new lines of one job's logs."""

    def __init__(self, paths: JobPaths, ranks: dict[int, str]) -> None:
        """`ranks` are the ranks to read, with the prefix of each."""
        self.logs = {paths.log(rank): prefix for rank, prefix in ranks.items()}
        self.offsets = dict.fromkeys(self.logs, 0)
        self.partial = dict.fromkeys(self.logs, b"")

    def lines(self, end: bool = False) -> Iterator[str]:
        """The lines since the last call, those of one rank together; `end`: also a last one without a newline."""
        for path, prefix in self.logs.items():
            for chunk in self._chunks(path):
                *lines, self.partial[path] = (self.partial[path] + chunk).split(b"\n")
                for line in lines:
                    yield prefix + clean(line)
            if end and self.partial[path]:
                yield prefix + clean(self.partial[path])
                self.partial[path] = b""

    def _chunks(self, path: Path) -> Iterator[bytes]:
        try:
            with open_regular(path) as file:
                file.seek(self.offsets[path])
                while chunk := file.read(CHUNK):
                    self.offsets[path] += len(chunk)
                    yield chunk
        except OSError:
            return  # the worker has not started yet


def prefixes(nodes: dict[int, str]) -> dict[int, str]:
    """For each rank and the name of its node, what stands before its lines, all of one width."""
    names = {rank: f"{node} {rank}" for rank, node in nodes.items()}
    width = max(map(len, names.values()), default=0)
    return {rank: f"{name:<{width}} | " for rank, name in names.items()}


def tail(path: Path, count: int) -> list[str]:
    """The last `count` lines of a log, from its last 64 KiB."""
    try:
        with open_regular(path) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - (1 << 16)))
            return [clean(line) for line in file.read().splitlines()[-count:]]
    except OSError:
        return []
