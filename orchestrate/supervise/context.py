"""State that the parts of a supervisor share, and waits that a stop request interrupts."""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path

from orchestrate.clock import Clock, wait_until
from orchestrate.dataclass import dataclass, field, replace
from orchestrate.engines.base import Engine, Session, never
from orchestrate.errors import EngineError
from orchestrate.plan.plan import Plan
from orchestrate.record.events import DiskFull, Event, WarningIssued
from orchestrate.record.history import History
from orchestrate.record.outcomes import Activity, JobResult, Outcome, Stack
from orchestrate.record.recorder import Recorder
from orchestrate.spec.spec import JobSpec
from orchestrate.supervise.job_files import JobFiles
from orchestrate.supervise.open_stores import NoCopies

ENGINE_TIMEOUT = 300.0  # seconds that the engine may not respond, or the disk of the run directory may be full
STOPPING_TIMEOUT = 10.0  # the same in seconds while the job is being stopped
BY_USER, BY_MAX_RUN, BY_SCHEDULER = "stopped by the user", "max_run was reached", "the allocation ends"
BY_REQUEUES = "slurm.requeues"  # and its value
TRANSIENT_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)


class UsageSink:
    """Gets what the workers are doing, every second if it is wanted; this one wants nothing."""

    @property
    def wanted(self) -> bool:
        """Whether to ask nodes what their workers are doing."""
        return False

    def record(self, found: Mapping[int, Activity]) -> None:
        """Record the activity of the workers, by rank."""

    @property
    def wants_stacks(self) -> bool:
        """Whether to ask nodes for the stacks of their workers."""
        return False

    def record_stacks(self, found: Mapping[int, Stack]) -> None:
        """Record the stacks of the workers, by rank."""


class Over(Exception):
    """The job is over."""

    def __init__(self, result: JobResult) -> None:
        self.result = result


class Requeued(Exception):
    """The job is to go on in the next allocation of a scheduler, which ends this one."""


class _TransientError(OSError):
    """A write that may succeed later, once the disk has space or works again."""


@dataclass(frozen=True, kw_only=True)
class JobContext:
    """A job that is being supervised."""

    spec: JobSpec
    stored_plan: Plan  # of the newest generation when this supervisor started; without secrets
    run: Path  # the folder that nodes see: the job folder, or the cluster's folder, which contains it
    engine: Engine
    emit: Recorder
    stops: Callable[[], int]  # number of stop requests so far
    evicted: Callable[[], bool] = never  # whether a scheduler ends the allocation of the job
    files: JobFiles
    without_nodes: bool = False  # whether an earlier supervisor has removed them, and only the report is missing
    copies: NoCopies = field(default_factory=NoCopies)
    usage: UsageSink = field(default_factory=UsageSink)

    @property
    def clock(self) -> Clock:
        """The clock of the job."""
        return self.emit.clock

    @cached_property
    def plan(self) -> Plan:
        """The plan of the newest generation when this supervisor started."""
        return replace(self.stored_plan, command=self.spec.command_line)

    @cached_property
    def history(self) -> History:
        """The state of the job when this supervisor started."""
        return History(self.emit.events)

    @cached_property
    def session(self) -> Session:
        """The job's nodes and workers; raises EngineError if they cannot be reached, and may then be retried."""
        return self.engine.open(self.spec, self.plan, self.run, self.warn)

    def warn(self, text: str) -> None:
        """Show a warning to the user."""
        self.emit(WarningIssued(text))

    def over(self) -> str:
        """Return why the job is to end: it was asked to, or `max_run` was reached; empty if it goes on."""
        if self.stops():
            return BY_USER
        if self.evicted():
            return BY_SCHEDULER
        late = self.spec.max_run and self.emit.seconds() - self.history.since > self.spec.max_run
        return BY_MAX_RUN if late else ""

    def go_on(self) -> None:
        """Raise Over if the job is to end, Requeued if it is to go on in another allocation."""
        if why := self.over():
            if why == BY_SCHEDULER:
                raise Requeued
            raise Over(JobResult(Outcome.STOPPED, why))

    def is_over(self) -> bool:
        """Whether the job is to end."""
        return bool(self.over())

    def hurried(self) -> bool:
        """Whether the job was asked to stop a second time."""
        return self.stops() > 1

    def requests(self) -> tuple[int, str]:
        """Return the number of stop requests, and why the job is to end."""
        return self.stops(), self.over()

    def sleep(self, seconds: float, since: tuple[int, str] | None = None) -> bool:
        """Wait; return True as soon as there is a stop request, or `max_run` is reached, now or `since` earlier."""
        since = since or self.requests()
        return wait_until(lambda: self.requests() != since, seconds, self.clock, 0.05)

    def retry(self, action: Callable[[], None], fails: type[Exception], event: Callable[[str], Event]) -> None:
        """Retry `action` until it succeeds or the time limit is reached; emit `event` at the first failure.

        The limit is shorter once the job is to end: a paused node, for example, does not respond.
        """
        deadline = self.clock.monotonic() + ENGINE_TIMEOUT
        emitted = False
        while True:
            try:
                return action()
            except fails as error:
                if not emitted:
                    self.emit(event(str(error)))
                emitted = True
                if self.over():
                    deadline = min(deadline, self.clock.monotonic() + STOPPING_TIMEOUT)
                if self.clock.monotonic() > deadline or self.sleep(1.0):
                    raise

    def write(self, action: Callable[[], None]) -> None:
        """Write files that a generation needs to start; retries while the disk is full or fails."""

        def write() -> None:
            try:
                action()
            except OSError as error:
                if error.errno in TRANSIENT_ERRORS:
                    raise _TransientError(error.errno, error.strerror, error.filename) from None
                raise

        try:
            self.retry(write, _TransientError, DiskFull)
        except OSError as error:
            raise EngineError(f"cannot write to the run directory: {error}") from None
