"""What happens to a job: a class for each event, and the line of events.jsonl that it is. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Annotated, Any

from orchestrate.files import typed
from orchestrate.job.outcomes import JOB_OUTCOMES, GenerationResult, Outcome, Reason
from orchestrate.node import checks

VERSION = 1  # of the form of events.jsonl, which its first line names
OURS = ("event", "outcome", "word", "cause", "known", "node", "job_id", "engine")  # keys whose text only we choose

Time = Annotated[float, checks.time]
Number = Annotated[int, checks.up_to(1 << 31)]
JobOutcome = Annotated[Outcome, checks.one_of(JOB_OUTCOMES)]


@dataclass(frozen=True)
class Event:
    """Something that has happened to a job; the recorder adds when."""

    time: Time = field(default=0.0, kw_only=True)  # seconds since 1970
    seconds: Time = field(default=0.0, kw_only=True)  # since the job's start


@dataclass(frozen=True)
class SupervisorStarted(Event):
    """A supervisor begins, or goes on after another one: the first event of each."""

    job_id: str
    version: Number = VERSION


@dataclass(frozen=True)
class TakenOver(Event):
    """A supervisor has found a generation whose workers another one has started."""

    generation: Number


@dataclass(frozen=True)
class NodesStarting(Event):
    """The nodes are about to be brought up."""

    nodes: Number
    engine: str


@dataclass(frozen=True)
class NodesUp(Event):
    """The nodes of the next generation are up."""

    nodes: tuple[str, ...]
    hosts: dict[str, str]  # by node, where there are several


@dataclass(frozen=True)
class NodesMissing(Event):
    """The job goes on with fewer nodes than it wants."""

    nodes: tuple[str, ...]
    missing: Number
    error: str


@dataclass(frozen=True)
class NodesStopping(Event):
    """The nodes are about to be taken down."""


@dataclass(frozen=True)
class NodesDown(Event):
    """No node is left."""


@dataclass(frozen=True)
class NodesLeft(Event):
    """Nodes could not be taken down."""

    error: str


@dataclass(frozen=True)
class NodeInTrouble(Event):
    """A node does not do what it should, and may recover."""

    node: str
    trouble: str  # paused, silent or partition


@dataclass(frozen=True)
class NodeWell(Event):
    """A node that was in trouble has recovered."""

    node: str


@dataclass(frozen=True)
class NodeBack(Event):
    """A missing node is back."""


@dataclass(frozen=True)
class GenerationStarting(Event):
    """The workers are about to be started."""

    generation: Number
    nodes: tuple[str, ...]
    world_size: Number
    master_port: Number


@dataclass(frozen=True)
class GenerationStarted(Event):
    """The nodes were asked to start the workers."""

    generation: Number
    imports: tuple[str, ...]  # the packages that the nodes import first


@dataclass(frozen=True)
class WorkersAwaited(Event):
    """Some workers have not started yet, and the others wait for them."""

    ranks: tuple[Number, ...]


@dataclass(frozen=True)
class WorkersStarted(Event):
    """All workers run."""


@dataclass(frozen=True)
class WorkerEnded(Event):
    """A worker has ended, or is given up."""

    rank: Number
    node: str
    exit_code: Number
    stopping: bool  # whether we had asked it to end
    known: Reason | None = None  # what ended it, where we gave it up while it may still run


@dataclass(frozen=True)
class WorkersStopping(Event):
    """The workers are asked to end."""

    why: str
    kill: bool  # by SIGKILL


@dataclass(frozen=True)
class WorkersLost(Event):
    """Workers that were asked to end have not reported that they did."""

    ranks: tuple[Number, ...]


@dataclass(frozen=True)
class HangFound(Event):
    """The job did nothing for `after` seconds."""

    states: dict[int, str]  # by rank, letters of proc(5)
    after: float


@dataclass(frozen=True)
class GenerationEnded(GenerationResult, Event):
    """All workers of a generation have ended."""


@dataclass(frozen=True)
class RestartDecided(Event):
    """Whether the job is started again after a failure."""

    restart: bool
    why: str
    delay: float  # seconds


@dataclass(frozen=True)
class EngineLost(Event):
    """The engine does not answer."""

    error: str


@dataclass(frozen=True)
class EngineBack(Event):
    """The engine answers again."""


@dataclass(frozen=True)
class DiskFull(Event):
    """The run directory cannot be written; the job waits."""

    error: str


@dataclass(frozen=True)
class WarningIssued(Event):
    """Something that the user should know."""

    text: str


@dataclass(frozen=True)
class OutcomeDecided(Event):
    """How the job ends; its nodes are still there."""

    outcome: JobOutcome
    reason: str


@dataclass(frozen=True)
class JobEnded(Event):
    """The job has ended, and its nodes are down."""

    outcome: JobOutcome
    reason: str


def name(kind: type[Event]) -> str:
    """The name of an event in events.jsonl: `nodes_up` for NodesUp."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()


KINDS = {name(kind): kind for kind in Event.__subclasses__()}


def to_line(event: Event) -> dict[str, Any]:
    """An event as an object of events.jsonl."""
    return {"event": name(type(event)), **typed.encode(event)}


def from_line(line: dict[str, Any]) -> Event | None:
    """The event that such an object is, None if it has an unknown name; raises ValueError if it is damaged."""
    kind = KINDS.get(line["event"])
    return typed.decode(line, kind) if kind else None
