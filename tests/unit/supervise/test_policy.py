"""Restart decisions must depend only on the rules, the budget and the progress."""

import re
from functools import partial

import pytest

from orchestrate.record.outcomes import Cause, GenerationResult, Outcome
from orchestrate.spec.causes import ACTIONS, CAUSES, RULES, Reason
from orchestrate.spec.spec import JobSpec
from orchestrate.supervise import policy
from orchestrate.supervise.policy import NOT_SAVED, Decision

decide, action = partial(policy.decide, search=re.search), partial(policy.action, search=re.search)


def failure(number: int, cause: str = "killed", **facts) -> GenerationResult:
    """A failed generation; `facts` override its fields and those of its cause."""
    code, lines = facts.pop("exit_code", 137), facts.pop("last_lines", [])
    found = Cause(rank=1, node="n", exit_code=code, cause=Reason(cause), summary="", hint="", last_lines=lines)
    facts = {"time": 100.0 * number, "lasted": 60.0, "progress": True, "step": number * 10} | facts
    return GenerationResult(generation=number, outcome=Outcome.FAILED, why="", cause=found, **facts)


def test_a_failure_must_lead_to_a_restart_within_the_budget():
    history = [failure(number) for number in range(4)]
    assert decide(JobSpec(), history[:1]) == Decision(True, "restart 1 of 3")
    assert decide(JobSpec(), history[:3]) == Decision(True, "restart 3 of 3")
    assert decide(JobSpec(), history[:4]) == Decision(False, "max_restarts is 3")


def test_a_failure_must_not_lead_to_a_restart_without_a_budget():
    assert decide(JobSpec(max_restarts=0), [failure(0)]) == Decision(False, "max_restarts is 0")


def test_restarts_before_the_window_must_not_count():
    history = [failure(0), failure(1), failure(2), failure(3, time=10_000.0)]
    assert decide(JobSpec(restart_window=3600), history) == Decision(True, "restart 1 of 3")
    at_its_edge = [failure(0, time=0.0), failure(1, time=1.0), failure(2, time=3600.0)]
    assert decide(JobSpec(restart_window=3600), at_its_edge) == Decision(True, "restart 2 of 3")


def test_a_clock_that_was_set_back_must_not_bring_failures_into_the_window():
    history = [failure(number, time=90_000.0 - 1000 * number) for number in range(4)]
    assert decide(JobSpec(restart_window=60), history) == Decision(True, "restart 1 of 3")
    history = [failure(number, time=90_000.0 - number) for number in range(4)]
    assert decide(JobSpec(restart_window=60), history) == Decision(False, "max_restarts is 3")


def test_a_job_that_always_claims_progress_must_not_restart_for_ever():
    often = [failure(number, "terminated", time=35.9 * number) for number in range(101)]
    assert decide(JobSpec(), often[:100]).restart
    assert decide(JobSpec(), often) == Decision(False, "more than 100 restarts within an hour")
    rarely = [failure(number, "terminated", time=36.0 * number) for number in range(1000)]
    assert decide(JobSpec(), rarely).restart
    wanted = [failure(number, time=float(number)) for number in range(1000)]
    assert decide(JobSpec(max_restarts=1000), wanted).restart


@pytest.mark.parametrize("cause", ["script", "usage", "not started", "GPU shared"])
def test_a_permanent_failure_must_never_be_retried(cause):
    assert decide(JobSpec(), [failure(0, cause)]) == Decision(False, "this kind of failure is not retried")


@pytest.mark.parametrize("cause", ["terminated", "host lost", "engine lost", "interrupted"])
def test_external_failures_must_not_be_counted(cause):
    history = [failure(number, cause) for number in range(50)]
    assert decide(JobSpec(max_restarts=0), history) == Decision(True, "not counted toward max_restarts")


def test_uncounted_failures_must_not_use_up_the_budget():
    history = [*(failure(number, "terminated") for number in range(5)), failure(5)]
    assert decide(JobSpec(max_restarts=1), history) == Decision(True, "restart 1 of 1")
    history = [*(failure(number) for number in range(5)), failure(5, "error")]
    spec = JobSpec(max_restarts=1, rules=[{"cause": "killed", "action": "ignore"}])
    assert decide(spec, history) == Decision(True, "restart 1 of 1")


def test_a_generation_that_was_stopped_to_add_a_node_must_not_be_counted():
    rescaled = GenerationResult(generation=1, outcome=Outcome.RESCALED, why="a node is back", time=100.0)
    assert decide(JobSpec(max_restarts=2), [failure(0), rescaled, failure(2)]) == Decision(True, "restart 2 of 2")


def test_three_generations_without_progress_must_end_the_job():
    history = [failure(number, progress=False, step=7) for number in range(3)]
    assert decide(JobSpec(max_restarts=100), history[:2]).restart
    assert decide(JobSpec(max_restarts=100), history) == Decision(False, NOT_SAVED)
    assert decide(JobSpec(max_restarts=100), [*history[:2], failure(2)]).restart
    assert decide(JobSpec(max_restarts=100), [failure(0), *history]) == Decision(False, NOT_SAVED)
    stopped = [failure(number, "terminated", progress=False) for number in range(3)]
    assert decide(JobSpec(), stopped) == Decision(False, NOT_SAVED)


@pytest.mark.parametrize("cause", ["engine lost", "interrupted"])
def test_losses_of_the_engine_must_not_end_a_job_for_lack_of_progress(cause):
    history = [failure(number, cause, progress=False) for number in range(5)]
    assert decide(JobSpec(), history).restart
    assert decide(JobSpec(), [*history, failure(5, progress=False)]).restart


@pytest.mark.parametrize("cause", ["out of memory", "out of memory in a child"])
def test_two_out_of_memory_failures_at_the_same_step_must_end_the_job(cause):
    history = [failure(0, cause, step=7), failure(1, cause, step=7)]
    assert decide(JobSpec(), history) == Decision(False, "out of memory twice at the same step")
    assert not decide(JobSpec(), [failure(0, step=3), *history]).restart
    assert not decide(JobSpec(), [history[0], failure(1, "engine lost", step=7), history[1]]).restart
    assert decide(JobSpec(), [failure(0, "out of memory", step=7), failure(1, "out of memory", step=8)]).restart
    assert decide(JobSpec(), [failure(0, step=7), failure(1, "out of memory", step=7)]).restart


def test_only_fast_failures_without_progress_must_increase_the_delay():
    spec = JobSpec(max_restarts=100)
    fast = [failure(number, "terminated", progress=False, lasted=1.0) for number in range(10)]
    mixed = [fast[0], failure(1), *fast[2:]]
    delays = [decide(spec, mixed[: number + 1]).delay for number in range(2, 4)]
    assert delays == [0.0, 1.0]
    slow = [failure(number, progress=False, lasted=100.0) for number in range(2)]
    assert decide(spec, slow).delay == 0.0
    near = [failure(number, progress=False, lasted=29.0) for number in range(2)]
    assert decide(spec, near).delay == 1.0
    further = [failure(number, lasted=1.0) for number in range(3)]
    assert decide(spec, further).delay == 0.0
    alternating = [failure(n, "engine lost", progress=False, lasted=1.0) for n in range(1100)]
    numbers = [*range(1, 9), len(alternating)]
    assert [decide(spec, alternating[:number]).delay for number in numbers] == [0, 1, 2, 4, 8, 16, 30, 30, 30]


@pytest.mark.parametrize(
    ("rule", "matches"),
    [
        ({"exit_codes": [75], "action": "ignore"}, False),
        ({"exit_codes": [137, 75], "action": "ignore"}, True),
        ({"log": "ECC error", "action": "ignore"}, True),
        ({"log": "^ECC$", "action": "ignore"}, False),
        ({"log": "epoch 3", "action": "ignore"}, True),
        ({"log": "3.uncorrectable", "action": "ignore"}, False),
        ({"cause": "killed", "action": "ignore"}, True),
        ({"cause": "killed", "exit_codes": [1], "action": "ignore"}, False),
    ],
)
def test_a_user_rule_must_apply_if_all_its_conditions_match(rule, matches):
    ended = failure(0, last_lines=["epoch 3", "uncorrectable ECC error"])
    assert action([rule], ended) == ("ignore" if matches else "count")


def test_the_first_matching_rule_must_win():
    rules = [{"cause": "crash", "action": "fail"}, {"cause": "killed", "action": "ignore"}]
    ended = failure(0)
    assert action([*rules, {"exit_codes": [137], "action": "fail"}], ended) == "ignore"
    assert action([{"exit_codes": [137], "action": "fail"}, *rules], ended) == "fail"


def test_a_user_rule_must_override_the_default_rules():
    assert decide(JobSpec(rules=[{"cause": "usage", "action": "count"}]), [failure(0, "usage")]).restart


@pytest.mark.parametrize("cause", ["no such file", "not writable", "no GPUs"])
def test_a_recurring_failure_must_be_retried_only_after_progress(cause):
    assert decide(JobSpec(), [failure(0, cause)]).restart
    why = "this kind of failure is not retried without progress"
    assert decide(JobSpec(), [failure(0, cause), failure(1, cause, progress=False)]) == Decision(False, why)


def test_the_default_rules_must_be_valid_user_rules():
    for rule in RULES:
        assert rule["action"] in ACTIONS and rule["cause"] in CAUSES
