"""Who sees a job while a supervisor runs it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from typing import Protocol

from orchestrate.plan.plan import Plan
from orchestrate.record import stacks, usage
from orchestrate.record.events import Event
from orchestrate.record.outcomes import Activity, Stack
from orchestrate.record.paths import JobPaths
from orchestrate.record.progress import Progress
from orchestrate.supervise.context import UsageSink

log = logging.getLogger(__name__)


class Observer(Protocol):
    """Shows a job; the supervisor calls these methods, none of which may block."""

    listeners: list[Callable[[Progress], None]]  # get the progress in the output of one worker

    @property
    def wants_use(self) -> bool:
        """Whether the activity of workers is displayed."""

    def use(self, found: Mapping[int, Activity]) -> None:
        """Show the activity of workers, by rank."""

    def following(self) -> contextlib.AbstractContextManager[None]:
        """Show the job during a `with` block, and all of its output before that ends."""

    def planned(self, plan: Plan) -> None:
        """Record the plan of a generation, before it starts."""

    def event(self, event: Event) -> None:
        """Show an event."""

    def message(self, text: str) -> None:
        """Show a message."""

    def is_behind(self) -> bool:
        """Whether the listeners may not have all progress yet."""

    def problems(self) -> list[str]:
        """Return what to warn about at the end."""


class SharedUsage(UsageSink):
    """Passes what the workers are doing to an observer, and to other processes that ask for it."""

    def __init__(self, paths: JobPaths, observer: Observer) -> None:
        self.paths, self.observer = paths, observer

    @property
    def wanted(self) -> bool:
        """Whether it is displayed, or another process asks for it."""
        return self.observer.wants_use or usage.asked(self.paths)

    def record(self, found: Mapping[int, Activity]) -> None:
        """Pass on what the workers are doing, by rank."""
        self.observer.use(found)
        if usage.asked(self.paths):
            try:
                usage.write(self.paths, found)
            except OSError as error:
                log.debug("%s cannot be written: %s", self.paths.usage, error)

    @property
    def wants_stacks(self) -> bool:
        """Whether another process asks for them."""
        return stacks.asked(self.paths)

    def record_stacks(self, found: Mapping[int, Stack]) -> None:
        """Write the stacks of the workers, by rank."""
        try:
            stacks.answer(self.paths, found)
        except OSError as error:
            log.debug("%s cannot be written: %s", self.paths.stacks, error)
