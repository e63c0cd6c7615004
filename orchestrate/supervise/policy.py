"""What a failure means: whether the gang starts again, and when. Pure; the rules are data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrate.job.outcomes import RULES, GenerationResult, Reason
from orchestrate.job.spec import JobSpec

Search = Callable[[str, str], object]  # search(pattern, text): whether a regular expression is found in a text

PASSING = ("no such file", "not writable", "no GPUs")  # causes that may pass where the job had come further before them
OUR_OWN = (Reason.ENGINE_LOST, Reason.INTERRUPTED)  # causes that say nothing of the job
NO_PROGRESS = 3  # generations without progress that end a job; as nvidia-resiliency-ext counts
CRASH_LOOP_SECONDS = 30.0  # seconds; a generation that fails sooner, without progress, is part of a crash loop
MAX_DELAY = 30.0  # seconds


@dataclass(frozen=True)
class Decision:
    """What comes after a failure."""

    restart: bool
    why: str  # for a person: the place in the budget, or why there is no restart
    delay: float = 0.0  # seconds to wait before


def action(rules: Sequence[dict[str, Any]], ended: GenerationResult, search: Search) -> str:
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


def decide(spec: JobSpec, history: Sequence[GenerationResult], search: Search) -> Decision:
    """Whether the gang starts again after the failure that `history` ends with."""
    last = history[-1]
    does = action(spec.rules, last, search)
    if does == "fail":
        return Decision(False, "this kind of failure is not tried again")
    failures = [ended for ended in history if ended.cause]
    telling = [ended for ended in failures if ended.cause and ended.cause.cause not in OUR_OWN]
    if len(telling) > 1 and all(
        ended.cause
        and ended.cause.cause in (Reason.OUT_OF_MEMORY, Reason.OUT_OF_MEMORY_IN_A_CHILD)
        and ended.step == last.step
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


def _delay(failures: Sequence[GenerationResult]) -> float:
    """Seconds to wait: none at first, then doubling, for failures that come fast and without progress."""
    loop = 0
    for ended in reversed(failures):
        if ended.progress or ended.lasted > CRASH_LOOP_SECONDS:
            break
        loop += 1
    return min(MAX_DELAY, 2.0 ** (loop - 2)) if loop > 1 else 0.0
