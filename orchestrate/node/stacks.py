"""Stacks of running workers: on a signal, a forked one writes the stack of its main thread, and goes on."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from orchestrate.node.protocol import MAX_STACK, SILENT, STARTING, UNABLE

if TYPE_CHECKING:
    from orchestrate.node.traffic import Timers

SHOW_STACK = 46  # as in zygote.py
HEAD = b"Stack (most recent call first):\n"  # of Python's fault handler, for one thread
LOOK, MAX_LOOKS = 0.02, 100  # seconds between two looks at what a worker has written, and their number
Tell = Callable[[int, str, str], None]  # gets rank and stack of a worker, or why there is none


class Stack:
    """A file in memory in which a worker writes its stack: both have it open, and it has no path."""

    def __init__(self, name: str) -> None:
        """Create it; without an effect if the system does not allow that. By its name, `debugger.py` finds a worker."""
        self.file = -1
        with contextlib.suppress(OSError, ValueError):
            self.file = os.memfd_create(name)

    def ask(self, pid: int) -> bool:
        """Let a process write its stack; return whether it can."""
        try:
            with open(f"/proc/{pid}/status") as status:
                caught = status.read().partition("\nSigCgt:")[2].split()[0]
            if not int(caught, 16) >> SHOW_STACK - 1 & 1:  # the signal would end it
                return False
            os.ftruncate(self.file, 0)
            os.lseek(self.file, 0, os.SEEK_SET)
            os.kill(pid, SHOW_STACK)
        except (OSError, ValueError, IndexError):  # it has ended
            return False
        return True

    @property
    def size(self) -> int:
        """How many bytes the worker has written; 0 once this is closed."""
        return os.fstat(self.file).st_size if self.file >= 0 else 0

    def text(self) -> str:
        """Return what the worker has written last: an earlier signal may have been handled late."""
        _, head, frames = os.pread(self.file, MAX_STACK, 0).rpartition(HEAD) if self.size else (b"", b"", b"")
        return (head + frames).decode(errors="replace")

    def close(self) -> None:
        """Close it."""
        if self.file >= 0:
            os.close(self.file)
            self.file = -1


def collect(loop: Timers, workers: Mapping[int, tuple[int, Stack | None]], tell: Tell) -> None:
    """Ask workers for their stacks; `workers` has the process ID and the file of each, by rank.

    `tell` gets each stack once it no longer grows.
    """
    files = {rank: stack for rank, (pid, stack) in workers.items() if stack and stack.ask(pid)}
    sizes = dict.fromkeys(files, 0)
    for rank in workers.keys() - files.keys():
        tell(rank, "", UNABLE if workers[rank][0] else STARTING)

    def look(count: int) -> None:
        for rank, before in list(sizes.items()):
            stack = files[rank]
            sizes[rank] = stack.size
            if before == stack.size > 0 or count == MAX_LOOKS:
                del sizes[rank]
                tell(rank, stack.text(), "" if stack.size else SILENT)
        if sizes:
            loop.after(LOOK, lambda: look(count + 1))

    loop.after(LOOK, lambda: look(1))
