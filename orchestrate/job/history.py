"""What the events of a job say of it: where a second supervisor goes on. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from orchestrate.job import events
from orchestrate.job.outcomes import GenerationResult, JobResult


class History:
    """A job so far."""

    def __init__(self, noted: Iterable[events.Event]) -> None:
        self.ended: list[GenerationResult] = []  # the generations that are over
        self.running = -1  # the generation whose workers were started last, if it is not over
        self.exits: list[events.WorkerEnded] = []  # what is known of its workers' ends
        self.stopping = ""  # why its workers were asked to end
        self.states: dict[int, str] = {}  # of its workers, as letters of proc(5), where it hung
        self.hosts: dict[str, str] = {}  # the machines of its nodes, where there are several
        self.outcome: JobResult | None = None  # once it was decided
        for event in noted:
            self._add(event)

    @property
    def furthest(self) -> int:
        """The highest step that a generation has come to."""
        return max((ended.step for ended in self.ended), default=0)

    def _add(self, event: events.Event) -> None:
        match event:
            case events.GenerationStarting():
                self.running, self.exits, self.stopping, self.states = event.generation, [], "", {}
            case events.NodesUp():
                self.hosts = event.hosts
            case events.WorkerEnded():
                self.exits.append(event)
            case events.WorkersStopping():
                self.stopping = self.stopping or event.why
            case events.HangFound():
                self.states = event.states
            case events.GenerationEnded():
                self.running = -1
                self.ended.append(event)
            case events.OutcomeDecided():
                self.outcome = JobResult(event.outcome, event.reason)
