"""A supervisor that takes over from a dead one must continue from its events; on a scripted engine."""

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
from support.methods import raising
from support.plans import HERE, plan
from support.recording import RecordingEngine
from support.scripted import ALL_WELL, KILLED

from orchestrate.errors import EngineLost
from orchestrate.record import events
from orchestrate.record.outcomes import Cause, JobResult, Outcome, Use, WorkerExit
from orchestrate.spec.causes import Reason
from orchestrate.spec.spec import JobSpec


def died(job, *happened: events.Event) -> None:
    """Write the events of a dead supervisor; those without a time are one second apart."""
    with job.paths.events.open("w") as file:
        for number, event in enumerate(happened):
            event = replace(event, time=event.time or 1.0, seconds=event.seconds or float(number))
            file.write(json.dumps(events.to_line(event)) + "\n")


STARTING = events.GenerationStarting(0, ("master", "trainer-1", "trainer-2"), 3, 29500)
STARTED = events.GenerationStarted(0, ())
STOPPING = events.WorkersStopping("a worker failed", kill=False)
ENDED = events.GenerationEnded(
    generation=0,
    outcome=Outcome.FAILED,
    why="a worker failed",
    cause=Cause(rank=1, node="trainer-1", exit_code=137, cause=Reason.KILLED, summary="", hint=""),
    lasted=1.0,
)
DECIDED = events.OutcomeDecided(Outcome.FAILED, "max_restarts is 0")


def test_if_nothing_was_started_it_must_start_from_the_beginning(job):
    died(job, events.SupervisorStarted("j"), events.NodesStarting(3, "docker"))
    engine = RecordingEngine([ALL_WELL])
    assert job.run(engine).outcome == "succeeded"
    assert engine.calls == ["up", "start", "down"]


def test_running_workers_must_be_adopted(job):
    died(job, STARTING, STARTED)
    engine = RecordingEngine([ALL_WELL])
    assert job.run(engine) == JobResult(Outcome.SUCCEEDED, "finished")
    assert engine.calls == ["adopt", "down"]
    assert job.noted("taken_over") == [{"generation": 0}]


def test_workers_that_cannot_be_adopted_must_restart_without_counting(job):
    died(job, STARTING)
    engine = RecordingEngine([[]], [ALL_WELL])
    adopt = engine.adopt
    engine.adopt = lambda *arguments: adopt(*arguments) | {2}
    assert job.run(engine, JobSpec(trainers=2, grace=0.01, max_restarts=0)).outcome == "succeeded"
    assert job.causes() == [(2, "interrupted")]
    assert engine.calls == ["adopt", "stop", "up", "start", "down"]


def test_a_recorded_failure_must_not_be_forgotten(job):
    died(job, events.NodesUp(("master", "trainer-1"), {"trainer-1": "gpu-box"}), STARTING, ended(1, 137))
    engine = RecordingEngine([[]], [ALL_WELL])
    assert job.run(engine).outcome == "succeeded"
    assert job.causes() == [(1, "killed")]
    assert "trainer-1 (gpu-box)" in job.noted("generation_ended")[0]["cause"]["summary"]
    assert engine.calls == ["adopt", "stop", "up", "start", "down"]


def test_a_recorded_stop_request_must_be_carried_out(job):
    died(job, STARTING, events.WorkersStopping("stopped by the user", kill=False))
    engine = RecordingEngine([[]])
    assert job.run(engine) == JobResult(Outcome.STOPPED, "stopped by the user")
    assert engine.calls == ["adopt", "stop", "down"]


def test_between_two_generations_it_must_decide_as_its_predecessor_would_have(job):
    died(job, STARTING, ENDED)
    engine = RecordingEngine([], [ALL_WELL])
    assert job.run(engine).outcome == "succeeded"
    assert engine.calls == ["adopt", "up", "start", "down"]  # files of the nodes may not have been copied yet
    assert engine.plans[0].workers[0].env["TORCHELASTIC_RESTART_COUNT"] == "1"


def test_a_spent_restart_budget_must_stay_spent(job):
    died(job, STARTING, ENDED)
    assert job.run(RecordingEngine(), JobSpec(trainers=2, max_restarts=0)) == JobResult(
        Outcome.FAILED, "max_restarts is 0"
    )


def test_after_the_outcome_it_must_only_take_down_the_nodes(job):
    died(job, STARTING, ENDED, DECIDED)
    engine = RecordingEngine()
    assert job.run(engine) == JobResult(Outcome.FAILED, "max_restarts is 0")
    assert engine.calls == ["adopt", "down"]  # files of the nodes may not have been copied yet


def test_nodes_that_cannot_be_adopted_must_be_taken_down_as_well(job, monkeypatch):
    """Not removed: they may have files that are still to be copied, and respond again."""
    died(job, STARTING, ENDED, DECIDED)
    engine = RecordingEngine()

    def adopt(*_) -> None:
        raise EngineLost("trainer-1 does not respond")

    monkeypatch.setattr(engine, "adopt", adopt)
    assert job.run(engine) == JobResult(Outcome.FAILED, "max_restarts is 0")
    assert engine.calls == ["down"]


@pytest.mark.parametrize(("ago", "word"), [(3600.0, "stopped"), (600.0, "succeeded")])
def test_max_run_must_count_from_the_start_of_the_job(job, ago, word):
    died(
        job,
        replace(STARTING, time=job.clock.now - ago),
        replace(STARTED, time=job.clock.now - 1),
    )
    engine = RecordingEngine([[], ALL_WELL])
    outcome = job.run(engine, JobSpec(trainers=2, max_run=1800.0))
    assert outcome.outcome == word
    assert engine.calls == (["adopt", "stop", "down"] if word == "stopped" else ["adopt", "down"])
    assert outcome.why == ("max_run was reached" if word == "stopped" else "finished")


def test_exits_of_an_earlier_generation_must_not_count_for_the_next(job):
    second = replace(STARTING, generation=1), replace(STARTED, generation=1)
    died(job, STARTING, STARTED, ended(1, 137), ENDED, *second)
    engine = RecordingEngine([[], [], ALL_WELL])
    assert job.run(engine) == JobResult(Outcome.SUCCEEDED, "finished")
    assert engine.calls == ["adopt", "down"]


def test_a_partial_last_line_must_not_stop_it(job):
    died(job, STARTING)
    with job.paths.events.open("a") as file:
        file.write('{"event": "worker_en')
    assert job.run(RecordingEngine([ALL_WELL])).outcome == "succeeded"
    assert json.loads(job.paths.events.read_text().splitlines()[-1])["event"] == "nodes_down"


def test_a_recorded_partition_must_not_be_forgotten(job):
    died(job, STARTING, replace(ended(1, 137), known=Reason.PARTITION), STOPPING)
    engine = RecordingEngine([[WorkerExit(0, 0), WorkerExit(1, 0), WorkerExit(2, 0)]], [ALL_WELL])
    assert job.run(engine).outcome == "succeeded"
    assert job.causes() == [(1, "partition")]


def ended(rank: int, code: int, seconds: float = 5.0, stopping: bool = False) -> events.WorkerEnded:
    return events.WorkerEnded(rank, f"trainer-{rank}", code, stopping, seconds=seconds)


def test_workers_that_had_succeeded_must_not_be_waited_for_or_stop_the_others(job):
    died(job, STARTING, STARTED, ended(1, 0))
    engine = RecordingEngine([[], [WorkerExit(0, 0), WorkerExit(2, 0)]])
    engine.adopt = lambda *arguments, adopt=engine.adopt: adopt(*arguments) | {1}
    assert job.run(engine) == JobResult(Outcome.SUCCEEDED, "finished")
    assert engine.calls == ["adopt", "down"]
    assert [end["rank"] for end in job.noted("worker_ended")] == [1, 0, 2]


def test_what_ended_workers_have_used_must_not_be_forgotten(job):
    use = Use(exchanged=100_000, connected=3.0, sampled=5.0, gpu=False, torch=True)
    died(job, STARTING, STARTED, *(replace(ended(rank, 0), use=use) for rank in (1, 2)))
    spec = JobSpec(trainers=2, grace=0.01, require_communication=True)
    assert job.run(RecordingEngine([[WorkerExit(0, 0)]]), spec) == JobResult(Outcome.SUCCEEDED, "finished")


def test_workers_that_ended_on_request_must_not_be_blamed(job):
    died(job, STARTING, STARTED, ended(1, 1), STOPPING, ended(0, 143, stopping=True), ended(2, 1, stopping=True))
    job.paths.log(1).write_text("RuntimeError: Connection reset by peer\n")
    job.paths.log(2).write_text("RuntimeError: Connection reset by peer\n")
    assert job.run(RecordingEngine([], [ALL_WELL])).outcome == "succeeded"
    assert job.causes() == [(1, "error")]


@pytest.mark.parametrize(("later", "cause"), [(0.5, (2, "killed")), (20.0, (1, "error"))])
def test_only_workers_that_ended_soon_after_the_first_must_be_blamed(job, later, cause):
    died(job, STARTING, STARTED, ended(1, 1), ended(2, 137, 5.0 + later, True), ended(0, 143, 5.0 + later, True))
    job.paths.log(1).write_text("RuntimeError: Connection reset by peer\n")
    assert job.run(RecordingEngine([], [ALL_WELL]), JobSpec(trainers=2, grace=30.0)).outcome == "succeeded"
    assert job.causes() == [cause]


def test_a_worker_of_a_node_that_was_cut_off_must_still_be_waited_for(job):
    died(job, STARTING, STARTED, replace(ended(1, 137), known=Reason.PARTITION), ended(0, 143, stopping=True))
    engine = RecordingEngine([[], [], [WorkerExit(2, 143)]], [ALL_WELL])
    engine.stop = lambda how: engine.calls.append("stop")
    assert job.run(engine).outcome == "succeeded"
    assert engine.calls == ["adopt", "stop", "discard trainer-1", "up", "start", "down"]


def test_the_last_lines_must_be_from_the_adopted_generation(job):
    died(job, STARTING, ENDED, replace(STARTING, generation=1), replace(STARTED, generation=1))
    job.paths.log(1).write_text("ModuleNotFoundError: No module named 'x'\n[node] generation 1\nnew\n")
    spec = JobSpec(trainers=2, grace=0.01)
    engine, second = RecordingEngine([[WorkerExit(1, 1)]], [ALL_WELL]), plan(spec, HERE, "j", 29501, generation=1)
    assert job.run(engine, spec, second).outcome == "succeeded"
    (_, cause, _) = [end.cause for end in job.supervisor.history.ended]
    assert (cause.cause, cause.last_lines) == ("error", ["new"])


def test_it_must_wait_for_an_engine_that_is_away(job):
    died(job, STARTING, STARTED)
    engine, began = RecordingEngine([ALL_WELL]), job.clock.now
    adopt = engine.adopt

    def away(*arguments):
        if job.clock.now < began + 200:
            raise EngineLost("gone")
        return adopt(*arguments)

    engine.adopt = away
    assert job.run(engine) == JobResult(Outcome.SUCCEEDED, "finished")
    assert job.noted("engine_lost") == [{"error": "gone"}]


def test_the_next_generation_must_follow_the_last_one_that_ended(job):
    died(job, STARTING, replace(ENDED, generation=4))
    engine, spec = RecordingEngine([], [ALL_WELL]), JobSpec(trainers=2, grace=0.01)
    assert job.run(engine, spec, plan(spec, HERE, "j", 29504, generation=4)).outcome == "succeeded"
    assert engine.plans[0].workers[0].env["TORCHELASTIC_RESTART_COUNT"] == "5"


@pytest.mark.parametrize(
    ("word", "why"), [("succeeded", "finished"), ("stopped", "max_run was reached"), ("lost", "gone")]
)
def test_a_generation_that_ended_the_job_must_decide_its_outcome(job, word, why):
    died(job, STARTING, ENDED, replace(ENDED, generation=1, outcome=Outcome(word), why=why, cause=None))
    engine = RecordingEngine()
    assert job.run(engine) == JobResult(word, why)
    assert engine.calls == ["adopt", "down"]


def test_a_generation_stopped_to_readmit_a_node_must_be_followed_by_the_next(job):
    died(job, STARTING, replace(ENDED, outcome=Outcome.RESCALED, why="a node is back", cause=None))
    engine = RecordingEngine([], [ALL_WELL])
    assert job.run(engine, JobSpec(trainers=2, max_restarts=0)) == JobResult(Outcome.SUCCEEDED, "finished")
    assert engine.calls == ["adopt", "up", "start", "down"]


def test_an_unstarted_plan_for_fewer_nodes_must_be_redone_for_the_existing_nodes(job):
    died(job, STARTING, ENDED)
    engine, spec = RecordingEngine([], [ALL_WELL]), JobSpec(trainers=2, grace=0.01, min_trainers=1)
    fewer = plan(spec, HERE, "j", 29501, generation=1, nodes=("master", "trainer-2"))
    assert job.run(engine, spec, fewer).outcome == "succeeded"
    assert len(engine.plans[0].workers) == 3


def test_progress_must_be_measured_from_the_furthest_step_of_earlier_generations(job):
    died(job, STARTING, replace(ENDED, step=50))
    job.paths.metrics.write_text('{"step": 40}\n')
    assert job.run(RecordingEngine([], [KILLED], [ALL_WELL]), JobSpec(trainers=2, grace=0.01)).outcome == "succeeded"
    assert [end.progress for end in job.supervisor.history.ended] == [False, False, False]


def test_each_action_must_be_recorded_before_it_is_taken(job):
    engine = RecordingEngine([[WorkerExit(1, 137)]], [ALL_WELL])
    last: list[tuple[str, str]] = []

    def noting(call: str, act: Callable[..., None]) -> Callable[..., None]:
        def note(*arguments, **more) -> None:
            last.append((call, json.loads(job.paths.events.read_text().splitlines()[-1])["event"]))
            act(*arguments, **more)

        return note

    for call in ("start", "stop", "up", "down"):
        setattr(engine, call, noting(call, getattr(engine, call)))
    job.run(engine)
    assert last == [
        ("up", "nodes_starting"),
        ("start", "generation_starting"),
        ("stop", "workers_stopping"),
        ("up", "nodes_starting"),
        ("start", "generation_starting"),
        ("down", "nodes_stopping"),
    ]
    once = ["nodes_starting", "generation_ended"]
    recorded = [name for name in job.names() if name in (*once, "restart_decided", "outcome_decided")]
    assert recorded == [*once, "restart_decided", *once, "outcome_decided"]
    assert job.names()[-3:] == ["outcome_decided", "nodes_stopping", "nodes_down"]


def test_a_recorded_stop_must_name_a_failed_worker_even_if_no_exit_was_recorded(job):
    died(job, STARTING, STARTED, STOPPING)
    engine = RecordingEngine([], [ALL_WELL])
    engine.stop = lambda how: None
    assert job.run(engine).outcome == "succeeded"
    assert [rank for rank, _ in job.causes()] == [0]


@pytest.mark.parametrize(
    ("stops", "result", "seconds"),
    [(0, JobResult(Outcome.LOST, "gone"), 300), (1, JobResult(Outcome.STOPPED, "stopped by the user"), 10)],
)
def test_an_engine_that_stays_away_must_lose_the_job_not_fail_it(job, stops, result, seconds):
    died(job, STARTING, STARTED)
    engine, began = RecordingEngine([]), job.clock.now
    engine.adopt = raising(EngineLost("gone"))
    job.stops = lambda: stops
    assert job.run(engine) == result
    assert job.clock.now - began == pytest.approx(seconds, abs=2)


def test_the_command_must_have_its_secrets_although_the_stored_plan_has_none(job):
    died(job, events.SupervisorStarted("j"))
    engine, spec = RecordingEngine([ALL_WELL]), JobSpec(trainers=2, command=("train.py", "--token", "hunter2000"))
    stored = replace(plan(spec, HERE, "j", 29500), command=("train.py", "--token", "***"))
    assert job.run(engine, spec, stored).outcome == "succeeded"
    assert engine.plans[0].command == spec.command


@pytest.mark.parametrize("seen", [0, 2])
def test_a_recorded_hang_must_stay_the_cause(job, seen):
    hang = events.HangFound({0: "S", 1: "T", 2: "S"}, 9.0)
    died(job, STARTING, STARTED, hang, *(ended(rank, 134, stopping=True) for rank in range(seen)))
    engine = RecordingEngine([[], [WorkerExit(rank, 134) for rank in range(seen, 3)]], [ALL_WELL])
    assert job.run(engine).outcome == "succeeded"
    assert job.causes() == [(1, "hang")]
    assert "kill" in engine.calls
