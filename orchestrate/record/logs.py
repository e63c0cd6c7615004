"""Worker output for display: lines read from the logs of ranks, safe for a terminal."""

from __future__ import annotations

import contextlib
import copy
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from orchestrate import console
from orchestrate.files.folder import Folder, regular
from orchestrate.files.lines import Lines, last
from orchestrate.files.paths import LOGS, log
from orchestrate.node.trees import data
from orchestrate.plan.plan import Plan
from orchestrate.record.paths import JobPaths
from orchestrate.spec.spec import JobSpec

TAIL = 1 << 16  # bytes read at the end of a log
MAX_TAIL = 256 << 20  # bytes at the end of a log in which its last lines are looked for
OVERLAP = 1 << 17  # bytes, as many as secrets have, that are kept of a line that is split
SPLITS = (0, 1, 2, 3, *(1 << power for power in range(2, 18)))  # bytes before that, where it may be split
MAX_BAR = 1 << 12  # bytes at the end of an unterminated line in which a progress bar is looked for
NOISE = re.compile(  # what torch's C++ code prints after an error
    r"(?:\[rank\d+\]: ?)?(?:frame #\d+: .*\(0x[0-9a-f]+|Exception raised from .* \(most recent call first\):$"
    r"|CUDA kernel errors might be asynchronously |For debugging consider passing CUDA_LAUNCH_BLOCKING"
    r"|Compile with `TORCH_USE_CUDA_DSA`|Search for `cuda)"
)
LAST_OUTPUT = 4096  # bytes of earlier output of each rank that `attach` shows
UP = b"\x1b[A"  # the cursor goes up: ends each state of a bar of tqdm below another one
MARK = b"[node] generation "  # start of the line that a node writes before the output of each later generation


class Line(NamedTuple):
    """A line of a worker's output."""

    rank: int
    text: str
    offset: int  # of its first byte in the log


class Block(NamedTuple):
    """Lines that a worker has written one after the other: without secrets, and safe for a terminal."""

    rank: int
    text: str
    colored: str  # the same with colors, if they are kept
    raw: bytes  # as they are in the log
    offset: int  # of their first byte in the log

    def lines(self) -> Iterator[Line]:
        """Yield each line."""
        offset = self.offset
        for text, raw in zip(self.colored.split("\n"), self.raw.split(b"\n")):
            yield Line(self.rank, text, offset)
            offset += len(raw) + 1


def clean(lines: bytes, colors: bool = False) -> str:
    """Decode lines: the final state of a progress bar, without terminal control sequences except for colors."""
    if b"\r" in lines:
        lines = b"\n".join(line.rstrip(b"\r").rpartition(b"\r")[2] for line in lines.split(b"\n"))
    return console.clean(lines.decode(errors="replace"), colors)


class Follower:
    """Reads new lines from the logs of one job."""

    def __init__(
        self,
        paths: JobPaths,
        ranks: Iterable[int],
        marks: bool = True,
        hide: Callable[[str], str] = str,
        colors: bool = False,
    ) -> None:
        """Read the logs of `ranks`.

        `marks` includes the lines that mark a new generation; `hide` removes secrets from a line; `colors` keeps the
        sequences that set colors.
        """
        self.paths, self.marks, self.hide, self.colors = paths, marks, hide, colors
        self.read: dict[int, Lines] = {}
        self.silent = True  # whether no worker has written anything yet
        self.follow(ranks)

    def follow(self, ranks: Iterable[int]) -> None:
        """Read these ranks from now on, each from its last position."""
        self.ranks = sorted(ranks)
        self.read |= {rank: Lines(splitter(self.hide)) for rank in self.ranks if rank not in self.read}

    def copied(self) -> Follower:
        """Return another follower, which continues where this one has read."""
        other = copy.copy(self)
        other.read = {rank: copy.copy(read) for rank, read in self.read.items()}
        return other

    def skip(self, last: int) -> None:
        """Skip existing output, except for the last lines of each log (at most `last` bytes)."""
        for rank, folder in self._each():
            with contextlib.suppress(OSError), regular(_name(rank), folder) as file:
                self.read[rank].skip(file, last)

    def tail(self, lines: int) -> None:
        """Skip output before the last `lines` lines of each log."""
        for rank, folder in self._each():
            with contextlib.suppress(OSError), regular(_name(rank), folder) as file:
                self.read[rank].tail(file, lines, MAX_TAIL)
                self.silent = self.silent and not self.read[rank].offset

    def near_end(self, most: int) -> None:
        """Skip output that is more than `most` bytes before the end of a log."""
        for rank, folder in self._each():
            with contextlib.suppress(OSError), regular(_name(rank), folder) as file:
                self.read[rank].near_end(file, most)

    def lines(self, end: bool = False, most: float = float("inf")) -> Iterator[Line]:
        """Yield the lines of `blocks`, one by one."""
        for block in self.blocks(end, most):
            yield from block.lines()

    def blocks(self, end: bool = False, most: float = float("inf")) -> Iterator[Block]:
        """Yield the lines written since the last call, grouped by rank; `end` includes a last line without a newline.

        Reads about `most` bytes of each log.
        """
        for rank, folder in self._each():
            read, last = self.read[rank], end
            with contextlib.suppress(OSError), regular(_name(rank), folder) as file:
                for raw in read.blocks(file, most):
                    yield from self._block(rank, raw, read.begin)
                last = end and not data(file, read.offset, 1)[1]
            if last and read.partial:
                yield from self._block(rank, read.rest(), read.begin)

    def _block(self, rank: int, raw: bytes, offset: int) -> Iterator[Block]:
        self.silent = self.silent and MARK in raw and all(line.startswith(MARK) for line in raw.split(b"\n"))
        nested = b"\x1b" in raw and UP in raw  # a search for one byte is much faster
        if not nested and (self.marks or MARK not in raw):
            yield self._shown(rank, raw, offset)
            return
        kept, start, at = list[bytes](), offset, offset
        for line in raw.split(b"\n"):
            at += len(line) + 1
            if not line.endswith(UP) and (self.marks or not line.startswith(MARK)):
                kept.append(line)
                continue
            if kept:
                yield self._shown(rank, b"\n".join(kept), start)
            kept, start = [], at
        if kept:
            yield self._shown(rank, b"\n".join(kept), start)

    def _shown(self, rank: int, raw: bytes, offset: int) -> Block:
        if (text := self.hide(plain := clean(raw))) != plain:
            text = "\n".join(map(self.hide, plain.split("\n")))  # a secret of several lines must not become one
        return Block(rank, text, self._colored(raw, text), raw, offset)

    def _colored(self, raw: bytes, text: str) -> str:
        """Return lines with their colors; those without, in which colors may be within a secret that `text` hides."""
        if not self.colors or b"\x1b[" not in raw:
            return text
        pairs = zip(raw.split(b"\n"), text.split("\n"))
        return "\n".join(clean(line, True) if clean(line) == hidden else hidden for line, hidden in pairs)

    def bars(self) -> dict[int, str]:
        """The progress bars of workers, by rank: unterminated lines with a carriage return."""
        partial = {rank: _end(self.read[rank].partial) for rank in self.ranks}
        return {rank: self.hide(clean(text)) for rank, text in partial.items() if b"\r" in text}

    def offsets(self) -> dict[int, int]:
        """How many bytes of each log have been read."""
        return {rank: read.offset for rank, read in self.read.items()}

    def is_behind(self) -> bool:
        """Whether workers have written what was not read yet."""
        found = False
        for rank, folder in self._each():
            with contextlib.suppress(OSError):
                status = os.stat(_name(rank), dir_fd=folder, follow_symlinks=False)
                found |= stat.S_ISREG(status.st_mode) and status.st_size > self.read[rank].offset
        return found

    def _each(self) -> Iterator[tuple[int, int]]:
        """Each rank with a descriptor of the log folder; nothing if that folder does not exist."""
        with contextlib.suppress(OSError), self.paths.folder.opened(LOGS) as folder:
            for rank in self.ranks:
                yield rank, folder


def _end(line: bytes) -> bytes:
    """Return the end of a long line, from a carriage return on, so that no secret is cut."""
    if len(line) <= MAX_BAR:
        return line
    at = line.find(b"\r", -MAX_BAR)
    return line[at:] if at >= 0 else b""


def _name(rank: int) -> str:
    return os.path.basename(log(rank))


def rest(paths: JobPaths, spec: JobSpec, plan: Plan, last: int | None = LAST_OUTPUT) -> Follower:
    """Return a follower of worker output, starting with its last lines: at most `last` bytes for each rank, or all."""
    follower = Follower(paths, [worker.rank for worker in plan.workers], hide=spec.mask())
    if last is not None:
        follower.skip(last)
    return follower


def splitter(hide: Callable[[str], str]) -> Callable[[bytes], int]:
    """Return a function that says where a long line is split: where that cuts neither a secret nor a control sequence.

    `hide` removes secrets.
    """

    def shown(part: bytes) -> str:
        return hide(console.clean(part.decode(errors="replace")))

    def split(line: bytes) -> int:
        for back in SPLITS:
            at = len(line) - OVERLAP - back
            before, after = line[at - OVERLAP : at], line[at : at + OVERLAP]
            if shown(before) + shown(after) == shown(before + after):
                return at
        return len(line) - OVERLAP

    return split


def tail(folder: Folder, rank: int) -> str:
    """The end of a worker's log, as text that is safe for a terminal."""
    try:
        with folder.open(log(rank)) as file:
            return clean(b"\n".join(last(file, TAIL)).removesuffix(b"\n"))
    except OSError:
        return ""


def last_lines(text: str, generation: int, count: int, main: bool = False) -> list[str]:
    """The last lines that a worker wrote in a generation; of a dump of all its stacks, only the first part.

    That is the thread that has failed, or with `main` the main thread, whichever has got the signal that we have sent.
    `text` is the end of its log. Lines before a dump are kept: they are the worker's own. C++ stack frames and torch's
    general advice, of which NCCL's watchdog prints dozens of lines, are left out.
    """
    mark = f"{MARK.decode()}{generation}"
    lines = text.rpartition(mark + "\n")[2].splitlines() if generation else text.splitlines()
    lines = [line for line in lines if not NOISE.match(line)]
    if text.endswith(mark):
        return []
    fatal = [i for i, line in enumerate(lines) if line.startswith("Fatal Python error: ")]
    if not fatal:
        return lines[-count:]
    dump = [line for line in lines[fatal[-1] :] if "/orchestrate/node/programs/zygote.py" not in line]
    threads = [i for i, line in enumerate(dump) if line.startswith(("Current thread", "Thread 0x"))]
    current = threads[-1:] if main else [i for i in threads if dump[i].startswith("Current")]
    stack = dump[current[0] :] if current else dump[1:]
    head = [*[line for line in lines[: fatal[-1]] if line.strip()][-(count // 3) :], lines[fatal[-1]]]
    return head + [line for line in stack if line.strip() and not line.startswith("Extension modules")][: count // 2]
