"""Stacks of workers, as Python's fault handler prints them: where each one is, and which are equal."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import groupby, takewhile

from orchestrate.dataclass import dataclass

WAITING = ("/torch/distributed/", "/torch/autograd/", "/torch/nn/parallel/")  # code in which a rank waits for others
INNERMOST, FEW = 3, 1  # frames of libraries that are shown of the innermost ones, and of others
NEAR = 8  # frames from the innermost one in which such code counts
_FRAME = re.compile(r'^ *File "(.+)", line (\d+) in (\S+)', re.M)
_OUTER = re.compile(
    r'/orchestrate/node/programs/zygote\.py"|/multiprocessing/process\.py", line \d+ in (run|_bootstrap)$'
)
_HEAD = re.compile(r"^(?=Stack \()", re.M)
_LIBRARY = re.compile(r"/(site|dist)-packages/|/lib/python3|^<frozen|/orchestrate/node/programs/(zygote|debugger)\.py$")
_DEBUGGER = re.compile(r"/(pdb|bdb|pydevd|node/programs/debugger)\.py$")


@dataclass(frozen=True)
class Position:
    """A worker's position in its main thread."""

    where: str  # FILE:LINE in FUNCTION, in the user's code if possible
    inner: str  # the innermost function
    waits: bool  # whether it waits in a collective
    own: bool = True  # whether it is in code of the user
    debugged: bool = False  # whether it is in a debugger, or waits for one


def parse_position(log: str) -> Position | None:
    """Parse the last stack that Python's fault handler printed for the main thread; None if there is none."""
    return position(log.rpartition("Fatal Python error: ")[2] if "Fatal Python error: " in log else "")


def position(dump: str) -> Position | None:
    """Parse the stack of the main thread in the stacks that Python's fault handler has printed; None without one."""
    blocks = re.split(r"^(?:(?:Current thread|Thread) 0x|Stack \().*\n", dump, flags=re.M)[1:]
    # The main thread is the oldest, and so the last. The signal may have reached any other: that is the current one.
    frames = ([frames for frames in map(_FRAME.findall, blocks) if frames] or [[]])[-1]
    if not frames:
        return None
    own = [frame for frame in frames if not _LIBRARY.search(frame[0])] or frames
    file, line, function = own[0]
    debugged = any(_DEBUGGER.search(file) for file, _, _ in frames[:NEAR])
    return Position(f"{file}:{line} in {function}", frames[0][2], _waits(frames), own is not frames, debugged)


def _waits(frames: Sequence[tuple[str, str, str]]) -> bool:
    """Whether the innermost frames, before any of the user's code, are of code in which a rank waits for others."""
    inner = takewhile(lambda file: _LIBRARY.search(file) or _waits_in(file), [file for file, _, _ in frames[:NEAR]])
    return any(map(_waits_in, inner))


def _waits_in(file: str) -> bool:
    return any(part in file for part in WAITING)


def processes(text: str) -> tuple[str, list[str]]:
    """Return the stack of a worker, and those of its child processes, without what their parents did before a fork.

    Children that run no code of the user are left out, such as those that wait for the next batch to load.
    """
    own, *children = [part for part in _HEAD.split(text) if part.strip()] or [""]
    below = [f"{part.splitlines()[0]}\n{frames(part)}" for part in children]
    return own, [part for part in below if (found := position(part)) and found.own]


def frames(stack: str) -> str:
    """Return the lines with frames of a process's own code and of what that calls."""
    lines = [line for line in stack.splitlines() if _FRAME.match(line)]
    ours = next((number for number, line in enumerate(lines) if _OUTER.search(line)), len(lines))
    while ours and '"<frozen runpy>"' in lines[ours - 1]:
        ours -= 1
    return "\n".join(lines[:ours])


def folded(lines: str) -> str:
    """Return frames with those of libraries left out, except for the innermost frames and a few between others."""
    found: list[str] = []
    for library, part in groupby(lines.splitlines(), lambda line: bool(_LIBRARY.search(_FRAME.match(line)[1]))):  # type: ignore[index]
        frames = [*part]
        kept = (INNERMOST if not found else FEW) if library else len(frames)
        left = len(frames) - kept
        found += frames if left <= FEW else [*frames[:kept], f"  … {left} frames of libraries"]
    return "\n".join(found)


def grouped(stacks: Mapping[int, str]) -> list[tuple[list[int], str]]:
    """Return the ranks of each stack: small groups first, and of equal ones, those that do not wait for others."""
    groups: dict[str, list[int]] = {}
    for rank, stack in sorted(stacks.items()):
        groups.setdefault(stack, []).append(rank)

    def order(group: tuple[list[int], str]) -> tuple[int, bool, int]:
        return len(group[0]), _waits(_FRAME.findall(group[1])), group[0][0]

    return sorted(((ranks, stack) for stack, ranks in groups.items()), key=order)
