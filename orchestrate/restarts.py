"""What a failure means: whether the gang starts again, and when. Pure; the rules are data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestrate.spec import JobSpec

Search = Callable[[str, str], object]  # search(pattern, text): whether a regular expression is found in a text

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
PASSING = ("no such file", "not writable", "no GPUs")  # causes that may pass where the job had come further before them
OUR_OWN = ("engine lost", "interrupted")  # causes that say nothing of the job
NO_PROGRESS = 3  # generations without progress that end a job; as nvidia-resiliency-ext counts
FAST = 30.0  # seconds; a generation that fails sooner, without progress, is part of a crash loop
LONGEST_DELAY = 30.0  # seconds


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
class Ended:
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
class Decision:
    """What comes after a failure."""

    restart: bool
    why: str  # for a person: the place in the budget, or why there is no restart
    delay: float = 0.0  # seconds to wait before


def action(rules: Sequence[dict[str, Any]], ended: Ended, search: Search) -> str:
    """What the first rule that fits a failure says; one that none fits is counted."""
    cause = ended.cause
    assert cause
    text = "\n".join(cause.last_lines)
    ours = () if ended.progress and cause.cause in PASSING else RULES
    for rule in [*rules, *ours]:
        if (
            ("exit_codes" not in rule or cause.exit_code in rule["exit_codes"])
            and ("cause" not in rule or rule["cause"] == cause.cause)
            and ("log" not in rule or search(rule["log"], text))
        ):
            return str(rule["action"])
    return "count"


def decide(spec: JobSpec, history: Sequence[Ended], search: Search) -> Decision:
    """Whether the gang starts again after the failure that `history` ends with."""
    last = history[-1]
    does = action(spec.rules, last, search)
    if does == "fail":
        return Decision(False, "this kind of failure is not tried again")
    failures = [ended for ended in history if ended.cause]
    telling = [ended for ended in failures if ended.cause and ended.cause.cause not in OUR_OWN]
    if len(telling) > 1 and all(
        ended.cause and ended.cause.cause.startswith("out of memory") and ended.step == last.step
        for ended in telling[-2:]
    ):
        return Decision(False, "out of memory twice at the same step")
    counted = [
        ended
        for ended in failures
        if ended.cause and last.time - ended.time < spec.restart_window and action(spec.rules, ended, search) == "count"
    ]
    if does == "count" and len(counted) > spec.max_restarts:
        return Decision(False, f"max_restarts is {spec.max_restarts}")
    if len(telling) >= NO_PROGRESS and not any(ended.progress for ended in telling[-NO_PROGRESS:]):
        return Decision(False, f"no progress in {NO_PROGRESS} generations")
    place = f"restart {len(counted)} of {spec.max_restarts}" if does == "count" else "not counted"
    return Decision(True, place, _delay(failures))


def _delay(failures: Sequence[Ended]) -> float:
    """Seconds to wait: none at first, then doubling, for failures that come fast and without progress."""
    loop = 0
    for ended in reversed(failures):
        if ended.progress or ended.lasted > FAST:
            break
        loop += 1
    return min(LONGEST_DELAY, 2.0 ** (loop - 2)) if loop > 1 else 0.0
