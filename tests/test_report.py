"""The report must say what a person wants to know, from what there is."""

import pytest
from test_plan import HERE

from orchestrate.plan import plan
from orchestrate.report import report, text
from orchestrate.spec import JobSpec
from orchestrate.supervisor import Outcome

PLAN = plan(JobSpec(trainers=2), HERE, "j", 29500)


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


@pytest.mark.parametrize("row", [3, [0.1, 0.2], [0.1, 0.2, "0.3"], [0.1, 0.2, None], []])
def test_what_a_script_writes_wrongly_must_not_count(row):
    assert pace(*[row] * 20)["pace"] == []
