"""The interface through which a supervisor reports the progress of a job for display."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from orchestrate.job.events import Event
from orchestrate.job.outcomes import Activity
from orchestrate.job.plan import Plan


class Screen:
    """Shows nothing; a picture of the job overrides these methods, which two threads call."""

    # Called every second with the activity of the workers, by rank; None if it is not displayed.
    watch: Callable[[Mapping[int, Activity]], None] | None = None

    def planned(self, plan: Plan) -> None:
        """Take the plan of the next generation."""

    def event(self, event: Event) -> None:
        """Take an event."""

    def heard(self, rank: int, line: str) -> None:
        """Take a line that a worker has written."""

    def refresh(self, bars: Mapping[int, str]) -> None:
        """Draw again; `bars` are progress bars by rank, which are not in any line yet."""
