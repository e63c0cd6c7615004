"""State of a job, rebuilt from its events: where another supervisor continues. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from orchestrate.record import events
from orchestrate.record.outcomes import GenerationResult, JobResult


class History:
    """The state of a job so far."""

    def __init__(self, recorded: Iterable[events.Event]) -> None:
        self.ended: list[GenerationResult] = []  # completed generations
        self.before = 0  # how many of them belong to the time before the job was resumed
        self.since = 0.0  # seconds at which the job was resumed
        self.running = -1  # the running generation; -1 if there is none
        self.next = 0  # number of the next one
        self.exits: list[events.WorkerEnded] = []  # ends of its workers
        self.stopping = ""  # why its workers were asked to stop
        self.states: dict[int, str] = {}  # if it hung, the states of its workers, as letters of proc(5)
        self.hosts: dict[str, str] = {}  # host of each node, if there are several
        self.outcome: JobResult | None = None  # set once it is decided
        for event in recorded:
            self._add(event)

    @property
    def recent(self) -> list[GenerationResult]:
        """The completed generations since the job was started or resumed."""
        return self.ended[self.before :]

    @property
    def furthest(self) -> int:
        """The highest step that any generation has reached."""
        return max((ended.step for ended in self.ended), default=0)

    def _add(self, event: events.Event) -> None:
        match event:
            case events.JobResumed():
                self.before, self.since, self.outcome = len(self.ended), event.seconds, None
                self.running, self.exits, self.stopping, self.states = -1, [], "", {}
            case events.GenerationStarting():
                self.running, self.exits, self.stopping, self.states = event.generation, [], "", {}
                self.next = event.generation + 1
            case events.NodesUp():
                self.hosts = event.hosts
            case events.WorkerEnded():
                self.exits.append(event)
            case events.WorkersStopping():
                self.stopping = self.stopping or event.why
            case events.HangFound():
                self.states = event.states
            case events.GenerationEnded():
                self.running, self.next = -1, max(self.next, event.generation + 1)
                self.ended.append(event)
            case events.OutcomeDecided():
                self.outcome = JobResult(event.outcome, event.reason)
