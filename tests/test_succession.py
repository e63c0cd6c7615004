"""A supervisor that follows one that died must go on from its events, on an engine that plays a script."""

import json

import pytest
from scripted import ALL_WELL, Job, Scripted

from orchestrate.engines import Exit
from orchestrate.errors import EngineLost
from orchestrate.spec import JobSpec
from orchestrate.supervisor import Outcome


@pytest.fixture
def job(tmp_path, monkeypatch):
    return Job(tmp_path, monkeypatch)


def died(job, *events: dict) -> None:
    with job.paths.events.open("w") as file:
        for number, event in enumerate(events):
            file.write(json.dumps({"time": 1.0, "seconds": float(number), **event}) + "\n")


STARTING = {"event": "generation_starting", "generation": 0}
STARTED = {"event": "generation_started", "generation": 0}
ENDED = {
    "event": "generation_ended",
    "generation": 0,
    "word": "failed",
    "why": "a worker failed",
    "cause": {
        "rank": 1,
        "node": "trainer-1",
        "exit_code": 137,
        "cause": "killed",
        "summary": "",
        "hint": "",
        "last_lines": [],
        "log": "",
    },
    "lasted": 1.0,
    "step": 0,
    "progress": False,
}


def test_before_anything_was_started_it_must_begin_at_the_beginning(job):
    died(job, {"event": "supervisor_started"}, {"event": "nodes_starting"})
    engine = Scripted([ALL_WELL])
    assert job.run(engine).word == "succeeded"
    assert engine.calls == ["up", "start", "down"]


def test_while_workers_run_it_must_take_them_up(job):
    died(job, STARTING, STARTED)
    engine = Scripted([ALL_WELL])
    assert job.run(engine) == Outcome("succeeded", "finished")
    assert engine.calls == ["adopt", "down"]


def test_workers_that_nobody_knows_must_be_started_again_without_counting(job):
    died(job, STARTING)
    engine = Scripted([[]], [ALL_WELL])
    adopt = engine.adopt
    engine.adopt = lambda *arguments: adopt(*arguments) | {2}
    assert job.run(engine, JobSpec(trainers=2, grace=0.01, max_restarts=0)).word == "succeeded"
    assert job.causes() == [(2, "interrupted")]
    assert engine.calls == ["adopt", "stop", "up", "start", "down"]


def test_a_failure_that_was_seen_must_not_be_forgotten(job):
    died(job, STARTING, {"event": "worker_ended", "rank": 1, "exit_code": 137, "stopping": False})
    engine = Scripted([[]], [ALL_WELL])
    assert job.run(engine).word == "succeeded"
    assert job.causes() == [(1, "killed")]
    assert engine.calls == ["adopt", "stop", "up", "start", "down"]


def test_a_request_to_stop_that_was_passed_on_must_be_carried_out(job):
    died(job, STARTING, {"event": "workers_stopping", "why": "stopped by the user"})
    engine = Scripted([[]])
    assert job.run(engine) == Outcome("stopped", "stopped by the user")
    assert engine.calls == ["adopt", "stop", "down"]


def test_between_two_generations_it_must_decide_as_the_first_would_have(job):
    died(job, STARTING, ENDED)
    engine = Scripted([], [ALL_WELL])
    assert job.run(engine).word == "succeeded"
    assert engine.calls == ["adopt", "up", "start", "down"]  # what the nodes have may not be at home yet
    assert engine.plans[0][0].env["TORCHELASTIC_RESTART_COUNT"] == "1"


def test_a_budget_that_was_used_up_must_stay_used_up(job):
    died(job, STARTING, ENDED)
    assert job.run(Scripted(), JobSpec(trainers=2, max_restarts=0)) == Outcome("failed", "max_restarts is 0")


def test_after_the_outcome_only_the_nodes_must_be_taken_down(job):
    died(job, STARTING, ENDED, {"event": "outcome", "outcome": "failed", "reason": "max_restarts is 0"})
    engine = Scripted()
    assert job.run(engine) == Outcome("failed", "max_restarts is 0")
    assert engine.calls == ["adopt", "down"]  # what the nodes have may not be at home yet


def test_nodes_that_cannot_be_known_any_more_must_be_removed_all_the_same(job, monkeypatch):
    died(job, STARTING, ENDED, {"event": "outcome", "outcome": "failed", "reason": "max_restarts is 0"})
    engine = Scripted()

    def adopt(*_) -> None:
        raise EngineLost("trainer-1 does not answer")

    monkeypatch.setattr(engine, "adopt", adopt)
    assert job.run(engine) == Outcome("failed", "max_restarts is 0")
    assert engine.calls == ["remove j"]


@pytest.mark.parametrize(("ago", "word"), [(3600.0, "stopped"), (600.0, "succeeded")])
def test_the_maximum_run_time_must_count_from_the_start_of_the_job(job, ago, word):
    died(
        job,
        {**STARTING, "time": job.clock.now - ago},
        {**STARTED, "time": job.clock.now - 1},
    )
    engine = Scripted([[], ALL_WELL])
    outcome = job.run(engine, JobSpec(trainers=2, max_run=1800.0))
    assert outcome.word == word
    assert engine.calls == (["adopt", "stop", "down"] if word == "stopped" else ["adopt", "down"])
    assert outcome.why == ("max_run is over" if word == "stopped" else "finished")


def test_the_ends_of_an_earlier_generation_must_not_count_as_those_of_the_next(job):
    exit = {"event": "worker_ended", "rank": 1, "node": "trainer-1", "exit_code": 137, "stopping": False}
    second = {"generation": 1}
    died(job, STARTING, STARTED, exit, ENDED, {**STARTING, **second}, {**STARTED, **second})
    engine = Scripted([[], [], ALL_WELL])
    assert job.run(engine) == Outcome("succeeded", "finished")
    assert engine.calls == ["adopt", "down"]


def test_half_a_last_line_must_not_stop_it(job):
    died(job, STARTING)
    with job.paths.events.open("a") as file:
        file.write('{"event": "worker_en')
    assert job.run(Scripted([ALL_WELL])).word == "succeeded"
    assert json.loads(job.paths.events.read_text().splitlines()[-1])["event"] == "nodes_down"


def test_a_partition_that_was_seen_must_not_be_forgotten(job):
    cut_off = {"event": "worker_ended", "rank": 1, "exit_code": 137, "stopping": False, "known": "partition"}
    died(job, STARTING, cut_off, {"event": "workers_stopping", "why": "a worker failed"})
    engine = Scripted([[Exit(0, 0), Exit(1, 0), Exit(2, 0)]], [ALL_WELL])
    assert job.run(engine).word == "succeeded"
    assert job.causes() == [(1, "partition")]
