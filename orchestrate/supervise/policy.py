"""Restart policy: whether and when the gang restarts after a failure. Pure; the rules are data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from orchestrate.dataclass import dataclass, replace
from orchestrate.record.outcomes import GenerationResult
from orchestrate.spec.causes import RULES, Reason
from orchestrate.spec.spec import JobSpec

Search = Callable[[str, str], object]  # search(pattern, text): whether a regular expression is found in a text

TRANSIENT = ("no such file", "not writable", "no GPUs")  # causes that may be transient if the job made progress
NOT_THE_JOB = (Reason.ENGINE_LOST, Reason.INTERRUPTED)  # causes outside the job
NO_PROGRESS = 3  # generations without progress that end a job, as in nvidia-resiliency-ext
CRASH_LOOP_SECONDS = 30.0  # a generation that fails sooner, without progress, is part of a crash loop
MAX_AN_HOUR, HOUR = 100, 3600.0  # restarts, if they are not counted, and seconds
NOT_SAVED = f"no progress in {NO_PROGRESS} generations: the script saved no new checkpoint, and reported no higher step"
MAX_DELAY = 30.0  # seconds


@dataclass(frozen=True)
class Decision:
    """Whether to restart after a failure."""

    restart: bool
    why: str  # the place in the restart budget, or why there is no restart
    delay: float = 0.0  # seconds before the restart


def action(rules: Sequence[dict[str, Any]], ended: GenerationResult, search: Search) -> str:
    """Return the action of the first rule that matches a failure; `count` if none does."""
    cause = ended.cause
    assert cause
    text = "\n".join(cause.last_lines)
    built_in = () if ended.progress and cause.cause in TRANSIENT else RULES
    for rule in [*rules, *built_in]:
        if (
            ("exit_codes" not in rule or cause.exit_code in rule["exit_codes"])
            and ("cause" not in rule or rule["cause"] == cause.cause)
            and ("log" not in rule or search(rule["log"], text))
        ):
            return str(rule["action"])
    return "count"


def decide(spec: JobSpec, history: Sequence[GenerationResult], search: Search) -> Decision:
    """Decide whether the gang restarts after the failure at the end of `history`."""
    last = history[-1]
    last_action = action(spec.rules, last, search)
    if last_action == "fail":
        retried = action(spec.rules, replace(last, progress=True), search) != "fail"
        return Decision(False, "this kind of failure is not retried" + " without progress" * retried)
    failures = [ended for ended in history if ended.cause]
    relevant = [ended for ended in failures if ended.cause and ended.cause.cause not in NOT_THE_JOB]
    if len(relevant) > 1 and all(
        ended.cause
        and ended.cause.cause in (Reason.OUT_OF_MEMORY, Reason.OUT_OF_MEMORY_IN_A_CHILD)
        and ended.step == last.step
        for ended in relevant[-2:]
    ):
        return Decision(False, "out of memory twice at the same step")
    counted = [
        ended
        for ended in failures
        if abs(last.time - ended.time) < spec.restart_window and action(spec.rules, ended, search) == "count"
    ]
    lately = [ended for ended in relevant if abs(last.time - ended.time) < HOUR]  # the clock may have been set back
    if last_action == "count" and len(counted) > spec.max_restarts:
        return Decision(False, f"max_restarts is {spec.max_restarts}")
    if last_action == "ignore" and len(lately) > MAX_AN_HOUR:
        return Decision(False, f"more than {MAX_AN_HOUR} restarts within an hour")
    if len(relevant) >= NO_PROGRESS and not any(ended.progress for ended in relevant[-NO_PROGRESS:]):
        return Decision(False, NOT_SAVED)
    place = (
        f"restart {len(counted)} of {spec.max_restarts}"
        if last_action == "count"
        else "not counted toward max_restarts"
    )
    return Decision(True, place, _delay(failures))


def _delay(failures: Sequence[GenerationResult]) -> float:
    """Return seconds to wait: 0 at first, then doubling for each fast failure without progress."""
    loop = 0
    for ended in reversed(failures):
        if ended.progress or ended.lasted > CRASH_LOOP_SECONDS:
            break
        loop += 1
    return float(min(MAX_DELAY, 2 ** (loop - 2))) if loop > 1 else 0.0  # an integer of any size: floats overflow
