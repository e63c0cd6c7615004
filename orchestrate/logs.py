"""Worker output for a person's eyes: read from the per-rank files, a rank before each line, safe for a terminal."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from orchestrate.paths import JobPaths, open_regular

CHUNK = 1 << 20  # bytes
MARK = b"[node] generation "  # how a node begins the part of a log that is another generation's
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

    def __init__(self, paths: JobPaths, ranks: dict[int, str], marks: bool = True) -> None:
        """`ranks` are the ranks to read, with the prefix of each; `marks`: the nodes' marks of generations, too."""
        self.paths, self.marks = paths, marks
        self.logs: dict[Path, str] = {}
        self.offsets: dict[Path, int] = {}
        self.partial: dict[Path, bytes] = {}
        self.follow(ranks)

    def follow(self, ranks: dict[int, str]) -> None:
        """Read these ranks from now on, each from where it was read last."""
        logs = {self.paths.log(rank): prefix for rank, prefix in ranks.items()}
        self.offsets = dict.fromkeys(logs, 0) | self.offsets
        self.partial = dict.fromkeys(logs, b"") | self.partial
        self.logs = logs

    def skip(self, last: int = 4096) -> None:
        """Leave out what there is already, but for the last lines of each log (`last` bytes of it, at most)."""
        for path in self.logs:
            with contextlib.suppress(OSError), open_regular(path) as file:
                start = max(0, os.fstat(file.fileno()).st_size - last)
                file.seek(start)
                self.offsets[path] = start + (file.read().find(b"\n") + 1 if start else 0)

    def lines(self, end: bool = False) -> Iterator[str]:
        """The lines since the last call, those of one rank together; `end`: also a last one without a newline."""
        for path, prefix in self.logs.items():
            for chunk in self._chunks(path):
                *lines, self.partial[path] = (self.partial[path] + chunk).split(b"\n")
                for line in lines:
                    if self.marks or not line.startswith(MARK):
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


def tail(path: Path) -> str:
    """The last 64 KiB of a log, as text that is safe for a terminal."""
    try:
        with open_regular(path) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - (1 << 16)))
            return "\n".join(map(clean, file.read().removesuffix(b"\n").split(b"\n")))
    except OSError:
        return ""


def last_words(text: str, generation: int, count: int) -> list[str]:
    """The last lines that a worker of a generation wrote; of a dump of all its stacks, the first part alone.

    `text` is the end of its log. What stands before the dump is what it had to say itself.
    """
    mark = f"{MARK.decode()}{generation}"
    lines = text.rpartition(mark + "\n")[2].splitlines() if generation else text.splitlines()
    if text.endswith(mark):
        return []
    fatal = [i for i, line in enumerate(lines) if line.startswith("Fatal Python error: ")]
    if not fatal:
        return lines[-count:]
    dump = [line for line in lines[fatal[-1] :] if "/orchestrate/node/zygote.py" not in line]
    current = [i for i, line in enumerate(dump) if line.startswith("Current thread")]
    stack = dump[current[0] :] if current else dump[1:]
    head = lines[max(0, fatal[-1] - count // 3) : fatal[-1] + 1]
    return head + [line for line in stack if line.strip() and not line.startswith("Extension modules")][: count // 2]
