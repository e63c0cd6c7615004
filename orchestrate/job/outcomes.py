"""How workers, generations and jobs end, and why: the words that all layers share. Pure; it imports nothing of ours."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

LOST = 137  # the exit code of a worker that was lost with its node: that of SIGKILL
TERMINATED = 143  # the exit code after SIGTERM, and of a worker that was cancelled before it started

# `action` as in the podFailurePolicy of Kubernetes: end the job, count the restart, or restart without counting.
ACTIONS = ("fail", "count", "ignore")
CONDITIONS = {"exit_codes", "log", "cause"}


class Word(str, Enum):
    """Text of a fixed choice, which is written and shown as that text."""

    __str__ = str.__str__

    def __format__(self, format_spec: str) -> str:
        """As the text itself: what Enum does differs between versions of Python."""
        return str.__format__(self, format_spec)


class Outcome(Word):
    """How a job ends; a generation can also end to be launched again with a node that is back."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"
    LOST = "lost"
    RESCALED = "rescaled"


JOB_OUTCOMES = (Outcome.SUCCEEDED, Outcome.FAILED, Outcome.STOPPED, Outcome.LOST)


class Reason(Word):
    """What has ended a worker: a name for people, rules and reports."""

    ERROR = "error"
    SCRIPT = "script"
    USAGE = "usage"
    NOT_STARTED = "not started"
    NO_SUCH_FILE = "no such file"
    NOT_WRITABLE = "not writable"
    NO_GPUS = "no GPUs"
    KILLED = "killed"
    TERMINATED = "terminated"
    CRASH = "crash"
    SHARED_MEMORY = "shared memory"
    OUT_OF_MEMORY = "out of memory"
    OUT_OF_MEMORY_IN_A_CHILD = "out of memory in a child"
    OUT_OF_GPU_MEMORY = "out of GPU memory"
    GPU_ERROR = "GPU error"
    GPU_SHARED = "GPU shared"
    MISMATCH = "mismatch"
    DISK_FULL = "disk full"
    TIMEOUT = "timeout"
    HANG = "hang"
    LEFT_EARLY = "left early"
    PARTITION = "partition"
    HOST_LOST = "host lost"
    NODE_LOST = "node lost"
    NODE_STOPPED = "node stopped"
    ENGINE_LOST = "engine lost"
    INTERRUPTED = "interrupted"


CAUSES = {
    Reason.ERROR: "the worker ended with an error of its own",
    Reason.SCRIPT: "the script cannot be loaded: a module or file is missing, or the syntax is wrong",
    Reason.USAGE: "the script rejected its arguments (exit code 2, 64 or 78)",
    Reason.NOT_STARTED: "the worker could not be started (exit code 126 or 127)",
    Reason.NO_SUCH_FILE: "the script opened a file that does not exist",
    Reason.NOT_WRITABLE: "the worker tried to write to a read-only or protected path",
    Reason.NO_GPUS: "the worker used CUDA in a job without GPUs",
    Reason.KILLED: "the worker was killed (SIGKILL) by a user or the kernel",
    Reason.TERMINATED: "the worker got SIGTERM, as at a preemption",
    Reason.CRASH: "native code crashed: SIGSEGV, SIGABRT, SIGFPE, SIGILL",
    Reason.SHARED_MEMORY: "/dev/shm was full (SIGBUS)",
    Reason.OUT_OF_MEMORY: "the kernel killed the worker for lack of memory",
    Reason.OUT_OF_MEMORY_IN_A_CHILD: "the kernel killed a process that the worker had started",
    Reason.OUT_OF_GPU_MEMORY: "CUDA had no memory left",
    Reason.GPU_ERROR: "a kernel or the GPU itself failed: an illegal address, a failed assertion, ECC, a lost device",
    Reason.GPU_SHARED: "NCCL refused several workers on one GPU",
    Reason.MISMATCH: "the workers called different collectives",
    Reason.DISK_FULL: "no space was left where the worker wrote",
    Reason.TIMEOUT: "a worker did not take part in a collective in time",
    Reason.HANG: "no worker did anything any more",
    Reason.LEFT_EARLY: "a worker ended well while the others still worked with it",
    Reason.PARTITION: "the node was cut off from the job's network",
    Reason.HOST_LOST: "the host of the node was down, or cut off from the network",
    Reason.NODE_LOST: "the node ended by itself",
    Reason.NODE_STOPPED: "the node was stopped or removed",
    Reason.ENGINE_LOST: "the engine was away, and took the workers with it",
    Reason.INTERRUPTED: "the orchestrator died while it started the workers",
}
RULES: list[dict[str, Any]] = [
    {"cause": Reason.SCRIPT, "action": "fail"},
    {"cause": Reason.USAGE, "action": "fail"},
    {"cause": Reason.NOT_STARTED, "action": "fail"},
    {"cause": Reason.NO_SUCH_FILE, "action": "fail"},
    {"cause": Reason.NOT_WRITABLE, "action": "fail"},
    {"cause": Reason.NO_GPUS, "action": "fail"},
    {"cause": Reason.GPU_SHARED, "action": "fail"},
    {"cause": Reason.TERMINATED, "action": "ignore"},
    {"cause": Reason.HOST_LOST, "action": "ignore"},
    {"cause": Reason.ENGINE_LOST, "action": "ignore"},
    {"cause": Reason.INTERRUPTED, "action": "ignore"},
]


@dataclass(frozen=True)
class WorkerExit:
    """The end of a worker."""

    rank: int
    code: int  # 128 + n if signal n ended it
    asked: bool = True  # whether its node had asked it to end; true if unknown


@dataclass(frozen=True)
class Doing:
    """What a worker is doing."""

    state: str  # a letter of proc(5): R runs, S sleeps, D waits for a disk, T is stopped; empty if unknown
    cpu: float  # CPU seconds of the worker and its child processes


@dataclass(frozen=True)
class ObservedExit:
    """The end of a worker, as the supervisor heard of it."""

    at: float  # seconds
    exit: WorkerExit
    ours: bool  # whether we had asked it to end


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
    word: Outcome
    why: str
    cause: Cause | None = None
    time: float = 0.0  # by the wall clock
    lasted: float = 0.0  # seconds
    step: int = 0  # how far the job had come, by its metrics
    progress: bool = False  # whether this generation got the job further than it ever was


@dataclass(frozen=True)
class JobResult:
    """How a job ended: `word` is one of JOB_OUTCOMES."""

    word: Outcome
    why: str  # for a person
    left: str = ""  # why nodes were left, where they could not be taken down, or still have files
