"""Where a supervisor shows a job: messages, the output of workers, and its state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from orchestrate.dataclass import dataclass, field
from orchestrate.plan.plan import Plan
from orchestrate.record.events import Event
from orchestrate.record.outcomes import Activity
from orchestrate.record.progress import Progress
from orchestrate.show.format import Style


class Screen:
    """Shows nothing; a picture of the job overrides these methods, which two threads call."""

    # Called every second with the activity of the workers, by rank; None if it is not displayed.
    watch: Callable[[Mapping[int, Activity]], None] | None = None

    def began(self, seconds: float) -> None:
        """Record how long ago the job began, if that was before the screen was there."""

    def planned(self, plan: Plan) -> None:
        """Record the plan of the next generation."""

    def event(self, event: Event) -> None:
        """Record an event."""

    def heard(self, rank: int, found: Sequence[Progress]) -> None:
        """Record the progress in lines that a worker has written."""

    def refresh(self, bars: Callable[[], Mapping[int, Progress | None]]) -> None:
        """Draw again; `bars` returns the progress bars by rank, which are not in any line yet."""


@dataclass(frozen=True)
class Display:
    """Where everything about a job is shown."""

    message: Callable[[str], None]  # gets the supervisor's messages
    output: Callable[[str], None] | None = None  # gets the lines of workers; as `message` if it is None
    style: Style = Style()  # of these lines
    screen: Screen = field(default_factory=Screen)
    phases: bool = True  # whether the terminal shows what is in progress

    @property
    def show(self) -> Callable[[str], None]:
        """Return what gets the lines of workers."""
        return self.output or self.message
