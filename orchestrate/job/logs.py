"""Worker output for a person's eyes: read from the per-rank files, a rank before each line, safe for a terminal."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator

from orchestrate import console
from orchestrate.files.folder import Folder, regular
from orchestrate.files.lines import Lines
from orchestrate.files.paths import LOGS, JobPaths, log
from orchestrate.node.trees import data

TAIL = 1 << 16  # bytes of a log that are its end
NOISE = re.compile(  # what torch's C++ code prints after an error
    r"(?:\[rank\d+\]: ?)?(?:frame #\d+: .*\(0x[0-9a-f]+|Exception raised from .* \(most recent call first\):$"
    r"|CUDA kernel errors might be asynchronously |For debugging consider passing CUDA_LAUNCH_BLOCKING"
    r"|Compile with `TORCH_USE_CUDA_DSA`|Search for `cuda)"
)
MARK = b"[node] generation "  # how a node begins the part of a log that is another generation's


def clean(line: bytes) -> str:
    """A line as text: what a progress bar drew last, without anything that would steer the terminal."""
    text = line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")
    return console.clean(text)


class Follower:
    """Hands out the new lines of one job's logs."""

    def __init__(
        self, paths: JobPaths, ranks: dict[int, str], marks: bool = True, hide: Callable[[str], str] = str
    ) -> None:
        """`ranks` are the ranks to read, with the prefix of each; `marks`: the nodes' marks of generations, too.

        `hide` takes secrets out of a line.
        """
        self.paths, self.marks, self.hide = paths, marks, hide
        self.read: dict[int, Lines] = {}
        self.silent = True  # whether no worker has written anything yet
        self.follow(ranks)

    def follow(self, ranks: dict[int, str]) -> None:
        """Read these ranks from now on, each from where it was read last."""
        self.ranks = ranks
        self.read |= {rank: Lines() for rank in ranks.keys() - self.read.keys()}

    def skip(self, last: int = 4096) -> None:
        """Leave out what there is already, but for the last lines of each log (`last` bytes of it, at most)."""
        for rank, folder in self._each():
            with contextlib.suppress(OSError), regular(_name(rank), folder) as file:
                self.read[rank].skip(file, last)

    def lines(self, end: bool = False, most: float = float("inf")) -> Iterator[str]:
        """The lines since the last call, those of one rank together; `end`: also a last one without a newline.

        Of each log, about `most` bytes are read.
        """
        for rank, folder in self._each():
            read, prefix, last = self.read[rank], self.ranks[rank], end
            with contextlib.suppress(OSError), regular(_name(rank), folder) as file:
                for line in read.new(file, most):
                    mark = line.startswith(MARK)
                    self.silent = self.silent and mark
                    if self.marks or not mark:
                        yield prefix + self.hide(clean(line))
                last = end and not data(file, read.offset, 1)[1]
            if last and read.partial:
                yield prefix + self.hide(clean(read.rest()))

    def progress(self) -> str:
        """How far a worker says that it is, in a line that it has not ended but begun anew; empty if none says so."""
        for rank in sorted(self.ranks):
            if b"\r" in self.read[rank].partial:
                return self.ranks[rank] + self.hide(clean(self.read[rank].partial))
        return ""

    def _each(self) -> Iterator[tuple[int, int]]:
        """The ranks, with a descriptor of the folder of their logs; none where there is no such folder."""
        with contextlib.suppress(OSError), self.paths.folder.opened(LOGS) as folder:
            for rank in self.ranks:
                yield rank, folder


def _name(rank: int) -> str:
    return os.path.basename(log(rank))


def prefixes(nodes: dict[int, str]) -> dict[int, str]:
    """For each rank and the name of its node, what stands before its lines, all of one width."""
    names = {rank: f"{node} {rank}" for rank, node in nodes.items()}
    width = max(map(len, names.values()), default=0)
    return {rank: f"{name:<{width}} | " for rank, name in names.items()}


def tail(folder: Folder, rank: int) -> str:
    """The end of a worker's log, as text that is safe for a terminal."""
    try:
        with folder.open(log(rank)) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL))
            return "\n".join(map(clean, file.read(TAIL).removesuffix(b"\n").split(b"\n")))
    except OSError:
        return ""


def last_words(text: str, generation: int, count: int) -> list[str]:
    """The last lines that a worker of a generation wrote; of a dump of all its stacks, the first part alone.

    Stack frames of C++ code and torch's general advice are left out, of which NCCL's watchdog prints dozens of lines.

    `text` is the end of its log. What stands before the dump is what it had to say itself.
    """
    mark = f"{MARK.decode()}{generation}"
    lines = text.rpartition(mark + "\n")[2].splitlines() if generation else text.splitlines()
    lines = [line for line in lines if not NOISE.match(line)]
    if text.endswith(mark):
        return []
    fatal = [i for i, line in enumerate(lines) if line.startswith("Fatal Python error: ")]
    if not fatal:
        return lines[-count:]
    dump = [line for line in lines[fatal[-1] :] if "/orchestrate/node/zygote.py" not in line]
    current = [i for i, line in enumerate(dump) if line.startswith("Current thread")]
    stack = dump[current[0] :] if current else dump[1:]
    head = [*[line for line in lines[: fatal[-1]] if line.strip()][-(count // 3) :], lines[fatal[-1]]]
    return head + [line for line in stack if line.strip() and not line.startswith("Extension modules")][: count // 2]
