"""What the parts of a supervisor share: the job, its engine, and waiting that a request to stop cuts short."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from orchestrate.engines.base import Engine, Session
from orchestrate.errors import EngineError
from orchestrate.job.events import DiskFull, Event, WarningIssued
from orchestrate.job.plan import Plan
from orchestrate.job.recorder import Recorder
from orchestrate.job.spec import JobSpec
from orchestrate.supervise.job_files import JobFiles

ENGINE_TIMEOUT = 300.0  # seconds that the engine may be away, or the disk of the run directory full
STOPPING_TIMEOUT = 10.0  # seconds, where the job is to stop
MENDS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)  # what may be over soon; a folder that is gone is gone


class _Full(OSError):
    """What can be written again once there is space, or the disk answers."""


@dataclass(frozen=True, kw_only=True)
class Running:
    """A job that is being supervised."""

    spec: JobSpec
    plan: Plan  # of the generation that was the newest when this supervisor began
    run: Path  # the folder that nodes see: the job's, or that of its cluster, in which the job's is
    engine: Engine
    emit: Recorder
    stops: Callable[[], int]  # how often the job was asked to stop
    files: JobFiles

    @cached_property
    def session(self) -> Session:
        """The nodes and workers of the job; raises EngineError if there is no way to them, and may be asked again."""
        return self.engine.open(self.spec, self.plan, self.run, self.warn)

    def warn(self, text: str) -> None:
        """Show a warning to the user."""
        self.emit(WarningIssued(text))

    def hurried(self) -> bool:
        """Whether the job was asked to stop a second time."""
        return self.stops() > 1

    def sleep(self, seconds: float) -> bool:
        """Wait; True as soon as the job is asked to stop."""
        deadline = time.monotonic() + seconds
        before = self.stops()
        while time.monotonic() < deadline and self.stops() == before:
            time.sleep(0.05)
        return self.stops() > before

    def patiently(self, action: Callable[[], None], fails: type[Exception], event: Callable[[str], Event]) -> None:
        """Retry `action` until it succeeds or the time limit is over; emit `event` at the first failure.

        The limit is shorter if the job is being stopped: a paused node, for example, does not answer.
        """
        deadline = time.monotonic() + (STOPPING_TIMEOUT if self.stops() else ENGINE_TIMEOUT)
        emitted = False
        while True:
            try:
                return action()
            except fails as error:
                if not emitted:
                    self.emit(event(str(error)))
                emitted = True
                if time.monotonic() > deadline or self.sleep(1.0):
                    raise

    def write(self, action: Callable[[], None]) -> None:
        """Write what a generation cannot start without; a disk that is full may have space again soon."""

        def write() -> None:
            try:
                action()
            except OSError as error:
                if error.errno in MENDS:
                    raise _Full(error.errno, error.strerror, error.filename) from None
                raise

        try:
            self.patiently(write, _Full, DiskFull)
        except OSError as error:
            raise EngineError(f"the run directory cannot be written: {error}") from None
