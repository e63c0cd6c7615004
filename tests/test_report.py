"""The report must say what a person wants to know, from what there is."""

import pytest
from test_plan import HERE

from orchestrate.plan import plan
from orchestrate.report import report, text
from orchestrate.restarts import Cause, Ended
from orchestrate.spec import JobSpec
from orchestrate.supervisor import Outcome

PLAN = plan(JobSpec(trainers=2), HERE, "j", 29500)


def test_the_root_cause_must_be_that_of_the_last_generation_and_its_last_lines_be_shown():
    def ended(generation: int, rank: int) -> Ended:
        lines = [f"word {word} of rank {rank}" for word in range(3)]
        facts = {"exit_code": 1, "cause": "error", "hint": "look", "last_lines": lines, "log": f"rank-{rank}.log"}
        cause = Cause(rank=rank, node=f"trainer-{rank}", summary=f"rank {rank} failed", **facts)
        return Ended(generation=generation, word="failed", why="a worker failed", cause=cause, step=5 * generation)

    data = report(PLAN, Outcome("failed", "max_restarts is 1"), [ended(0, 1), ended(1, 2)], [], [], [])
    assert data["root_cause"]["rank"] == 2
    assert [failure["rank"] for failure in data["failures"]] == [1, 2]
    assert text(data).splitlines() == [
        "failed: 3 workers, 0.0 s (max_restarts is 1)",
        "generation 0: rank 1 failed",
        "first to fail: rank 2 failed",
        "    word 0 of rank 2",
        "    word 1 of rank 2",
        "    word 2 of rank 2",
        "whole log: rank-2.log",
        "hint: look",
    ]


def test_a_job_that_was_restarted_must_say_so_and_what_failed():
    cause = Cause(rank=1, node="n", exit_code=137, cause="killed", summary="rank 1 was killed", hint="")
    ended = [
        Ended(generation=0, word="failed", why="", cause=cause, step=7),
        Ended(generation=1, word="succeeded", why="finished"),
    ]
    data = report(PLAN, Outcome("succeeded", "finished"), ended, [{"event": "job_ended", "seconds": 3.0}], [], [])
    assert data["root_cause"] is None
    assert text(data).splitlines() == [
        "succeeded: 3 workers, 3.0 s, 2 generations",
        "generation 0: rank 1 was killed, at step 7",
    ]


def pace(*rows: object) -> dict:
    return report(PLAN, Outcome("succeeded", "finished"), [], [], [{"rank_seconds": row} for row in rows], [])


def test_a_worker_that_is_slow_in_most_steps_must_be_named_with_its_node():
    data = pace(*[[0.01, 0.012, 0.05]] * 9, [0.01, 0.012, 0.2])
    assert data["pace"][2] == {"rank": 2, "node": "trainer-2", "step_s": 0.05, "step_p95_s": 0.2, "others_s": 0.011}
    assert text(data).splitlines()[1:] == [
        "slow: rank 2 on trainer-2 took 50 ms a step for itself, the others 11 ms",
    ]


def test_a_worker_that_is_slow_now_and_then_must_not_be_named():
    data = pace(*[[0.01, 0.01, 0.01]] * 6, *[[0.01, 0.01, 0.5]] * 4)
    assert "slow" not in text(data)


def test_whole_numbers_of_seconds_must_count_as_well():
    assert [rank["step_s"] for rank in pace(*[[1, 0.5, 0]] * 10)["pace"]] == [1, 0.5, 0]


@pytest.mark.parametrize("row", [3, [0.1, 0.2], [0.1, 0.2, "0.3"], [0.1, 0.2, None], [0.1, 0.2, True], []])
def test_what_a_script_writes_wrongly_must_not_count(row):
    assert pace(*[row] * 20)["pace"] == []


def test_the_last_value_of_each_metric_must_be_the_final_one():
    rows = [
        {"step": 1, "loss": 0.5},
        {"step": 2, "loss": 0.25},
        {"epoch": 1, "accuracy": 0.9},
        {"step": 3, "loss": 0.2},
    ]
    data = report(PLAN, Outcome("succeeded", "finished"), [], [], rows, [])
    assert data["final_metrics"] == {"step": 3, "loss": 0.2, "epoch": 1, "accuracy": 0.9}
