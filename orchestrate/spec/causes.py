"""Causes of a worker's end, and what `rules` of a job file can do about them. Pure."""

from __future__ import annotations

from enum import Enum
from typing import Any

# `action` as in the podFailurePolicy of Kubernetes: end the job, count the restart, or restart without counting.
ACTIONS = ("fail", "count", "ignore")


CONDITIONS = {"exit_codes", "log", "cause"}


class TextEnum(str, Enum):
    """A string enum whose members are written and formatted as their values."""

    __str__ = str.__str__

    def __format__(self, format_spec: str) -> str:
        """Format as the value: the default differs between Python versions."""
        return str.__format__(self, format_spec)


class Reason(TextEnum):
    """Cause of a worker's end, as named in rules and reports."""

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
    Reason.ERROR: "the worker itself failed with an error",
    Reason.SCRIPT: "the script cannot run: a missing module, or, before any progress, an error such as `NameError`",
    Reason.USAGE: "the script rejected its arguments (exit code 2, 64 or 78)",
    Reason.NOT_STARTED: "the worker could not be started (exit code 126 or 127)",
    Reason.NO_SUCH_FILE: "the script opened a file that does not exist",
    Reason.NOT_WRITABLE: "the worker tried to write to a read-only or protected path",
    Reason.NO_GPUS: "the worker used CUDA in a job without GPUs",
    Reason.KILLED: "the worker was killed (SIGKILL) by a user or the kernel",
    Reason.TERMINATED: "the worker received SIGTERM, for example on preemption",
    Reason.CRASH: "native code crashed: SIGSEGV, SIGABRT, SIGFPE, SIGILL",
    Reason.SHARED_MEMORY: "/dev/shm was full (SIGBUS)",
    Reason.OUT_OF_MEMORY: "the kernel's OOM killer killed the worker",
    Reason.OUT_OF_MEMORY_IN_A_CHILD: "the kernel's OOM killer killed a child process of the worker",
    Reason.OUT_OF_GPU_MEMORY: "CUDA ran out of memory",
    Reason.GPU_ERROR: "a CUDA kernel or the GPU failed: illegal address, failed assertion, ECC error, lost device",
    Reason.GPU_SHARED: "NCCL refused several workers on one GPU",
    Reason.MISMATCH: "the workers called different collectives",
    Reason.DISK_FULL: "no space was left on the disk that the worker wrote to",
    Reason.TIMEOUT: "a worker did not join a collective in time",
    Reason.HANG: "all workers stopped making progress",
    Reason.LEFT_EARLY: "a worker exited with code 0 while others still communicated with it",
    Reason.PARTITION: "the node was cut off from the job's network",
    Reason.HOST_LOST: "the host of the node was down, or cut off from the network",
    Reason.NODE_LOST: "the node exited unexpectedly",
    Reason.NODE_STOPPED: "the node was stopped or removed",
    Reason.ENGINE_LOST: "the engine went down, and the workers with it",
    Reason.INTERRUPTED: "the orchestrator died while starting the workers",
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
