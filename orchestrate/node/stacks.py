"""Stacks of running workers: on a signal, a forked one writes the stack of its main thread, and goes on.

So do processes that a worker has forked, such as those that load its data, in the file that they inherit.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from orchestrate.node.messages.protocol import MAX_STACK, SILENT, STARTING, UNABLE
from orchestrate.node.warm import fields

if TYPE_CHECKING:
    from orchestrate.node.traffic import Timers

SHOW_STACK, FAR = 46, 1000  # as in zygote.py
HEAD = b"Stack (most recent call first):\n"  # of Python's fault handler, for one thread
LOOK, MAX_LOOKS = 0.02, 100  # seconds between two looks at what a worker has written, and their number
MAX_CHILDREN, CHILD_LOOKS = 32, 10  # processes of a worker that are asked, and looks for the answer of each
YOUNG = 2.0  # seconds after its start in which a child may be about to become another program, which the signal ends
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

    def ask_child(self, pid: int) -> bool:
        """Let a process that has this file from the worker write its stack; return whether it can.

        Another program may use the signal for something else.
        """
        with contextlib.suppress(OSError, IndexError, ValueError):
            age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields(pid)[19]) / os.sysconf("SC_CLK_TCK")
            same = os.path.samestat(os.stat(f"/proc/{pid}/fd/{FAR}"), os.fstat(self.file))
            return same and age > YOUNG and self.ask(pid)
        return False

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


class _Family:
    """The processes of a worker, which write their stacks one after another: they share a file."""

    def __init__(self, stack: Stack, first: int, pids: Sequence[int]) -> None:
        self.stack, self.text, self.size = stack, "", 0
        self.looks = self.left = MAX_LOOKS  # for the process that was asked, and for all
        self.later = [pid for pid in pids if pid != first][:MAX_CHILDREN]
        self.asked = stack.ask(first)

    def done(self) -> bool:
        """Take what the process that was asked has written, and ask the next one; return whether that was the last."""
        before, self.size = self.size, self.stack.size
        self.looks, self.left = self.looks - 1, self.left - 1
        if min(self.looks, self.left) > 0 and not before == self.size > 0:
            return False
        self.text, self.size, self.looks = self.text + self.stack.text(), 0, CHILD_LOOKS
        while self.text and self.later and self.left > 0:
            if self.stack.ask_child(self.later.pop(0)):
                return False
        return True


def collect(loop: Timers, workers: Mapping[int, tuple[int, Sequence[int], Stack | None]], tell: Tell) -> None:
    """Ask workers and their child processes for their stacks.

    `workers` has the process ID of each by rank, the IDs of all its processes, and its file. `tell` gets each worker's
    stack, followed by those of its children, once they no longer grow.
    """
    found = {rank: _Family(stack, pid, pids) for rank, (pid, pids, stack) in workers.items() if stack}
    families = {rank: family for rank, family in found.items() if family.asked}
    for rank in workers.keys() - families.keys():
        tell(rank, "", UNABLE if workers[rank][0] else STARTING)

    def look() -> None:
        for rank, family in list(families.items()):
            if family.done():
                del families[rank]
                tell(rank, family.text[:MAX_STACK], "" if family.text else SILENT)
        if families:
            loop.after(LOOK, look)

    loop.after(LOOK, look)
