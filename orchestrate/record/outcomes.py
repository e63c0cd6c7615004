"""How workers, generations and jobs end, and why; shared by all layers. Pure; imports nothing from the project."""

from __future__ import annotations

from orchestrate.dataclass import dataclass, field
from orchestrate.spec.causes import Reason, TextEnum

LOST_EXIT_CODE = 137  # exit code of a worker that was lost with its node: that of SIGKILL
TERMINATED_EXIT_CODE = 143  # exit code after SIGTERM, and of a worker that was canceled before it started


class Outcome(TextEnum):
    """Outcome of a job, or of a generation.

    A generation may also end to restart with a node that is back (RESCALED), or in the next allocation (REQUEUED).
    """

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"
    LOST = "lost"
    RESCALED = "rescaled"
    REQUEUED = "requeued"


JOB_OUTCOMES = (Outcome.SUCCEEDED, Outcome.FAILED, Outcome.STOPPED, Outcome.LOST)


@dataclass(frozen=True)
class Use:
    """What a worker has used so far."""

    exchanged: int  # bytes sent to and received from other workers
    connected: float  # seconds for which it was connected to another worker
    sampled: float  # seconds for which it was sampled
    gpu: bool  # whether it has opened a GPU
    torch: bool  # whether it has loaded torch
    version: str = ""  # of torch, if known
    launcher: str = ""  # what has started workers of its own in it, if that was seen


@dataclass(frozen=True)
class WorkerExit:
    """The end of a worker."""

    rank: int
    code: int  # 128 + n if signal n ended it
    stopping: bool = True  # whether it had been asked to stop; true if unknown
    use: Use | None = field(default=None, compare=False)  # None if unknown


@dataclass(frozen=True)
class Activity:
    """What a worker is doing."""

    state: str  # a letter of proc(5): R runs, S sleeps, D waits for a disk, T is stopped; empty if unknown
    cpu: float  # CPU seconds of the worker and its child processes
    memory: int = 0  # bytes of their memory that is in RAM; shared memory counts for each
    use: Use | None = None  # None if unknown
    pid: int = 0  # as its node sees it; 0 if unknown


@dataclass(frozen=True)
class Stack:
    """What a running worker's main thread is doing."""

    text: str  # its frames as Python's fault handler prints them, the innermost first; empty if they are unknown
    why: str = ""  # why they are unknown, as in `protocol.Stack`
    state: str = ""  # as in `Activity`


@dataclass(frozen=True, kw_only=True)
class Cause:
    """Why a generation failed."""

    rank: int
    node: str
    exit_code: int
    cause: Reason
    summary: str
    hint: str
    last_lines: list[str] = field(default_factory=list)
    log: str = ""


@dataclass(frozen=True, kw_only=True)
class GenerationResult:
    """How a generation ended."""

    generation: int
    outcome: Outcome
    why: str
    cause: Cause | None = None
    time: float = 0.0  # wall-clock time of its end, in seconds since 1970
    lasted: float = 0.0  # seconds
    step: int = 0  # the step that the job had reached, according to its metrics
    exchanged: dict[int, int] = field(default_factory=dict)  # bytes exchanged with other workers, by rank, if known
    versions: tuple[str, ...] = ()  # of torch that the workers have loaded, if known
    isolated: str = ""  # if the workers exchanged no data, how to change that
    progress: bool = False  # whether this generation got further than any before


@dataclass(frozen=True)
class JobResult:
    """How a job ended: `outcome` is one of JOB_OUTCOMES."""

    outcome: Outcome
    why: str  # for display
    left: str = ""  # why nodes were left behind, if they could not be taken down or still have files
