"""Copies the code folder of a job to its working directory, while its nodes start."""

from __future__ import annotations

import shlex
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from orchestrate.files.paths import WORK
from orchestrate.files.work import Copy
from orchestrate.host import users
from orchestrate.record import events
from orchestrate.supervise.context import JobContext

NAMED = 3  # files and folders that a warning names


class WorkCopy:
    """The copy of a job's code folder; files that exist in the working directory are kept."""

    def __init__(self, job: JobContext) -> None:
        self.job, self.ending = job, False
        self.running: Future[Copy] | None = None

    def begin(self) -> None:
        """Start to copy in the background."""
        pool = ThreadPoolExecutor(1)
        self.running = pool.submit(self._copy)
        pool.shutdown(wait=False)

    def finish(self) -> None:
        """Wait for the copy, which a stop request cuts short; raises OrchestrateError if it fails."""
        assert self.running
        began = time.monotonic()
        if isinstance(self.running.exception(), OSError):
            self.job.write(self._retry)
        copy = self.running.result()
        self.job.write(lambda: self.job.files.keep_copied(copy.copied))
        if copy.unreadable:
            self.job.warn(_warning(copy))
        self.job.emit(events.CodeCopied(copy.files, copy.bytes, copy.links, round(time.monotonic() - began, 3)))

    def end(self) -> None:
        """Stop a copy that is still running, so that nothing is written once the job has ended."""
        self.ending = True
        if self.running:
            self.running.exception()

    def _retry(self) -> None:
        done: Future[Copy] = Future()
        done.set_result(self._copy())  # may fail again; only then is it the one that `end` waits for
        self.running = done

    def _copy(self) -> Copy:
        placement = self.job.plan.placement
        hidden = {*self.job.engine.hidden(self.job.plan, self.job.run)}  # up to thousands, looked up for each file
        owner = users.nodes_of(self.job.spec.user)
        target = self.job.files.paths.folder
        copy = Copy(Path(placement.code), hidden, target, WORK, placement.original, owner, self._stopped)
        copy.run()
        return copy

    def _stopped(self) -> bool:
        return self.ending or self.job.stops() > 0


def _warning(copy: Copy) -> str:
    """Name what nodes cannot read, and what is closed to them."""
    names, more = ", ".join([*copy.unreadable][:NAMED]), len(copy.unreadable) - NAMED
    closed = shlex.join(dict.fromkeys(path for paths in [*copy.unreadable.values()][:NAMED] for path in paths))
    own = f"too large to copy, and closed to user {copy.owner[0]}, as whom nodes run" if copy.owner else "closed to you"
    todo = f"--data NAME=PATH for data, .dockerignore for the rest, or chmod {'a' if copy.owner else 'u'}+rX {closed}"
    return f"workers cannot read {names}{f' and {more} more' * (more > 0)}: {own}; {todo}"
