"""How workers are stopped: asked first, and killed after a second request or when it takes too long."""

from __future__ import annotations

from orchestrate.engines.base import Stop

REPORT_TIMEOUT = 5.0  # seconds after the grace period for nodes to report that their workers have exited


class Stopping:
    """The workers of a generation from the first request to stop on. Times are monotonic, in seconds."""

    def __init__(self, why: str, grace: float, now: float) -> None:
        """`grace` are the seconds between SIGTERM and SIGKILL."""
        self.why, self.grace = why, grace
        self.kill = False  # whether the workers are to be killed
        self.sent: Stop | None = None  # the last signal
        self.patient = now + grace - 1.0  # when the grace period is about to end
        self.kill_at = float("inf")  # when workers that are still running are killed
        self.killed_late = False  # whether that has happened: one of them may be the worker that held up the others
        self.killed: list[int] = []  # ranks of workers that had not ended after the grace period
        self.extend(now)

    def extend(self, now: float) -> None:
        """Wait for the workers to exit from now on."""
        self.give_up = now + REPORT_TIMEOUT + (0 if self.kill else self.grace)

    def escalate(self, now: float) -> bool:
        """Kill the workers that are still running; return whether that was not decided already."""
        self.kill_at = float("inf")
        if self.kill:
            return False
        self.kill = self.killed_late = True
        self.extend(now)
        return True

    def due(self) -> Stop | None:
        """Return the signal that is to be sent; None if it was sent."""
        wanted = Stop.KILL if self.kill else Stop.TERMINATE
        return wanted if self.sent != wanted else None
