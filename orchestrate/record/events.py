"""Events of a job: a dataclass for each event, and its form in events.jsonl. Pure."""

from __future__ import annotations

import re
from typing import Annotated, Any

from orchestrate.dataclass import dataclass, field
from orchestrate.files import typed
from orchestrate.node.messages import checks
from orchestrate.record.outcomes import JOB_OUTCOMES, GenerationResult, Outcome, Use, WorkerExit
from orchestrate.spec.causes import Reason

VERSION = 1  # of the format of events.jsonl; its first line contains it
OURS = ("event", "outcome", "cause", "known", "node", "job_id", "engine")  # keys whose text is never the job's

Time = Annotated[float, checks.time]
Number = Annotated[int, checks.up_to(1 << 31)]
JobOutcome = Annotated[Outcome, checks.one_of(JOB_OUTCOMES)]


@dataclass(frozen=True)
class Event:
    """An event of a job; the recorder sets its times."""

    time: Time = field(default=0.0, kw_only=True)  # seconds since 1970
    seconds: Time = field(default=0.0, kw_only=True)  # since the job's start


@dataclass(frozen=True)
class SupervisorStarted(Event):
    """A supervisor has started, or taken over from another one; the first event of each supervisor."""

    job_id: str
    prepared: Time = 0.0  # seconds that the command took before: it may have built an image, or tested the GPUs
    boot: str = ""  # identifies the start of this machine's kernel; empty if unknown
    monotonic: Time = 0.0  # seconds of the clock of that name, which does not change with the time of day
    version: Number = VERSION


class JobResumed(Event):
    """The job, which had ended, continues with another generation; its restart budget and time limit start again."""


@dataclass(frozen=True)
class TakenOver(Event):
    """A supervisor has taken over a generation whose workers another one had started."""

    generation: Number


@dataclass(frozen=True)
class NodesStarting(Event):
    """The nodes are about to start."""

    nodes: Number
    engine: str


@dataclass(frozen=True)
class CodeCopied(Event):
    """The code folder was copied to the working directory of the workers."""

    files: Number
    bytes: Annotated[int, checks.up_to(1 << 62)]
    links: Number  # to files and folders that were not copied
    waited: Time  # seconds for which the job waited for it, once its nodes were up


@dataclass(frozen=True)
class CheckpointsFetched(Event):
    """The newest checkpoints were fetched from the object store."""

    url: str
    files: Number
    bytes: Annotated[int, checks.up_to(1 << 62)]
    job: str  # which had copied them


@dataclass(frozen=True)
class NodesUp(Event):
    """The nodes of the next generation are up."""

    nodes: tuple[str, ...]
    hosts: dict[str, str]  # by node, if there are several hosts


@dataclass(frozen=True)
class NodesMissing(Event):
    """The job continues with fewer nodes than requested."""

    nodes: tuple[str, ...]
    missing: Number
    error: str


class NodesStopping(Event):
    """The nodes are about to be taken down."""


class NodesDown(Event):
    """All nodes are down."""


@dataclass(frozen=True)
class NodesLeft(Event):
    """Some nodes could not be taken down."""

    error: str


@dataclass(frozen=True)
class NodeInTrouble(Event):
    """A node has a problem from which it may recover."""

    node: str
    trouble: str  # paused, silent or partition


@dataclass(frozen=True)
class NodeWell(Event):
    """A node that was in trouble has recovered."""

    node: str


class NodeBack(Event):
    """A missing node has come back."""


@dataclass(frozen=True)
class GenerationStarting(Event):
    """The workers are about to start."""

    generation: Number
    nodes: tuple[str, ...]
    world_size: Number
    master_port: Number


@dataclass(frozen=True)
class GenerationStarted(Event):
    """The nodes were asked to start the workers."""

    generation: Number
    imports: tuple[str, ...]  # packages that the nodes import first


@dataclass(frozen=True)
class WorkersAwaited(Event):
    """Some workers have not started yet, and the others wait for them."""

    ranks: tuple[Number, ...]


class WorkersStarted(Event):
    """All workers are running."""


class CheckpointSaved(Event):
    """The checkpoints folder has new or changed entries; changes less than two seconds apart are one, for up to ten."""


@dataclass(frozen=True)
class WorkerEnded(Event):
    """A worker has ended, or is considered lost."""

    rank: Number
    node: str
    exit_code: Number
    stopping: bool  # whether the supervisor had asked it to stop
    known: Reason | None = None  # why it is considered lost, if it may still be running
    use: Use | None = None  # what it has used, if known

    @property
    def exit(self) -> WorkerExit:
        """The exit, as sessions report it."""
        return WorkerExit(self.rank, self.exit_code, self.stopping, self.use)


@dataclass(frozen=True)
class WorkersStopping(Event):
    """The workers are being stopped."""

    why: str
    kill: bool  # by SIGKILL


@dataclass(frozen=True)
class WorkersLost(Event):
    """Workers that were asked to stop have not reported their end."""

    ranks: tuple[Number, ...]


@dataclass(frozen=True)
class HangFound(Event):
    """The job was inactive for `after` seconds."""

    states: dict[int, str]  # by rank, letters of proc(5)
    after: float


@dataclass(frozen=True)
class WorkersIsolated(Event):
    """The workers have exchanged no data in their first minute."""

    world_size: Number
    hint: str


@dataclass(frozen=True)
class GpusUnused(Event):
    """Workers have not used their GPUs in their first minute."""

    ranks: tuple[Number, ...]


@dataclass(frozen=True)
class GenerationEnded(GenerationResult, Event):
    """All workers of a generation have ended."""


@dataclass(frozen=True)
class RestartDecided(Event):
    """The decision whether to restart the job after a failure."""

    restart: bool
    why: str
    delay: float  # seconds


@dataclass(frozen=True)
class EngineLost(Event):
    """The engine does not respond."""

    error: str


class EngineBack(Event):
    """The engine responds again."""


@dataclass(frozen=True)
class DiskFull(Event):
    """The run directory cannot be written; the job waits."""

    error: str


@dataclass(frozen=True)
class WarningIssued(Event):
    """A warning for the user."""

    text: str


@dataclass(frozen=True)
class OutcomeDecided(Event):
    """The outcome of the job is decided; its nodes are still up."""

    outcome: JobOutcome
    reason: str


@dataclass(frozen=True)
class JobEnded(Event):
    """The job has ended, and its nodes are down."""

    outcome: JobOutcome
    reason: str


def name(kind: type[Event]) -> str:
    """Name of an event in events.jsonl: `nodes_up` for NodesUp."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()


KINDS = {name(kind): kind for kind in Event.__subclasses__()}


def to_line(event: Event) -> dict[str, Any]:
    """Encode an event as an object of events.jsonl."""
    return {"event": name(type(event)), **typed.encode(event)}


def from_line(line: dict[str, Any]) -> Event | None:
    """Decode an event, or return None if its name is unknown; raises ValueError if it is damaged."""
    kind = KINDS.get(line["event"])
    return typed.decode(line, kind) if kind else None
