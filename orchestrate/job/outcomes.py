"""How workers, generations and jobs end, and why: the words that all layers share. Pure; it imports nothing of ours."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

LOST = 137  # the exit code of a worker that was lost with its node: that of SIGKILL
TERMINATED = 143  # the exit code after SIGTERM, and of a worker that was cancelled before it started

# `action` as in the podFailurePolicy of Kubernetes: end the job, count the restart, or restart without counting.
ACTIONS = ("fail", "count", "ignore")
CONDITIONS = {"exit_codes", "log", "cause"}
CAUSES = {
    "error": "the worker ended with an error of its own",
    "script": "the script cannot be loaded: a module or file is missing, or the syntax is wrong",
    "usage": "the script rejected its arguments (exit code 2, 64 or 78)",
    "not started": "the worker could not be started (exit code 126 or 127)",
    "no such file": "the script opened a file that does not exist",
    "not writable": "the worker tried to write to a read-only or protected path",
    "no GPUs": "the worker used CUDA in a job without GPUs",
    "killed": "the worker was killed (SIGKILL) by a user or the kernel",
    "terminated": "the worker got SIGTERM, as at a preemption",
    "crash": "native code crashed: SIGSEGV, SIGABRT, SIGFPE, SIGILL",
    "shared memory": "/dev/shm was full (SIGBUS)",
    "out of memory": "the kernel killed the worker for lack of memory",
    "out of memory in a child": "the kernel killed a process that the worker had started",
    "out of GPU memory": "CUDA had no memory left",
    "GPU error": "a kernel or the GPU itself failed: an illegal address, a failed assertion, ECC, a lost device",
    "GPU shared": "NCCL refused several workers on one GPU",
    "mismatch": "the workers called different collectives",
    "disk full": "no space was left where the worker wrote",
    "timeout": "a worker did not take part in a collective in time",
    "hang": "no worker did anything any more",
    "left early": "a worker ended well while the others still worked with it",
    "partition": "the node was cut off from the job's network",
    "host lost": "the host of the node was down, or cut off from the network",
    "node lost": "the node ended by itself",
    "node stopped": "the node was stopped or removed",
    "engine lost": "the engine was away, and took the workers with it",
    "interrupted": "the orchestrator died while it started the workers",
}
RULES: list[dict[str, Any]] = [
    {"cause": "script", "action": "fail"},
    {"cause": "usage", "action": "fail"},
    {"cause": "not started", "action": "fail"},
    {"cause": "no such file", "action": "fail"},
    {"cause": "not writable", "action": "fail"},
    {"cause": "no GPUs", "action": "fail"},
    {"cause": "GPU shared", "action": "fail"},
    {"cause": "terminated", "action": "ignore"},
    {"cause": "host lost", "action": "ignore"},
    {"cause": "engine lost", "action": "ignore"},
    {"cause": "interrupted", "action": "ignore"},
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
    cause: str  # one of CAUSES
    summary: str
    hint: str
    last_lines: list[str] = field(default_factory=list)
    log: str = ""


@dataclass(frozen=True, kw_only=True)
class GenerationResult:
    """How a generation ended."""

    generation: int
    word: str  # succeeded, failed, stopped, lost; rescaled: stopped by us, to take a node in again
    why: str
    cause: Cause | None = None
    time: float = 0.0  # by the wall clock
    lasted: float = 0.0  # seconds
    step: int = 0  # how far the job had come, by its metrics
    progress: bool = False  # whether this generation got the job further than it ever was


@dataclass(frozen=True)
class JobResult:
    """How a job ended: `word` is succeeded, failed, stopped or lost."""

    word: str
    why: str  # for a person
    left: str = ""  # why nodes were left, where they could not be taken down, or still have files
