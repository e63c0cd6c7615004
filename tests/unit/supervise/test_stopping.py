"""A job must stop as requested and in time, and its nodes must be removed; on a scripted engine."""

import errno
from collections.abc import Callable

import pytest
from support.methods import before, raising
from support.plans import HERE, plan
from support.recording import RecordingEngine
from support.scripted import ALL_WELL, KILLED

from orchestrate.engines.base import Stop, never
from orchestrate.errors import EngineError
from orchestrate.patience import Abandoned
from orchestrate.record import events
from orchestrate.record.outcomes import JobResult, Outcome, WorkerExit
from orchestrate.spec.spec import JobSpec
from orchestrate.supervise.job_files import JobFiles


class Unstoppable(RecordingEngine):
    """An engine whose workers never end."""

    def stop(self, how: Stop) -> None:
        self.calls.append("kill" if how is Stop.KILL else "stop")


@pytest.mark.parametrize(("requests", "grace"), [(0, 7.0), (1, 7.0), (2, 0)])
def test_nodes_must_get_the_grace_period_unless_stopped_twice(job, requests, grace):
    engine = RecordingEngine([] if requests else [ALL_WELL])
    job.stops = lambda: requests * ("start" in engine.calls)
    job.run(engine, JobSpec(trainers=2, grace=7.0))
    assert engine.calls[-1] == "down" and engine.graces == [grace]


def test_a_second_request_to_stop_must_take_effect_while_nodes_are_removed(job):
    engine, answers, requests = RecordingEngine([ALL_WELL]), [], [0]
    job.stops = lambda: requests[0]

    def down(grace: float, stopped: Callable[[], bool] = never) -> None:
        for requests[0] in range(3):
            answers.append(stopped())
        raise EngineError("stopped before all files were copied")

    engine.down = down
    assert job.run(engine).left == "stopped before all files were copied"
    assert answers == [False, False, True]


def test_warnings_during_the_removal_of_nodes_must_be_reported(job):
    engine = RecordingEngine([ALL_WELL])
    engine.down = before(engine.down, lambda: engine.warn("some files are not copied"))
    job.run(engine)
    assert job.noted("warning_issued") == [{"text": "some files are not copied"}]


def test_unknown_nodes_must_get_the_grace_period_before_they_are_removed(job):
    engine = RecordingEngine()
    job.stops = lambda: 1
    assert job.run(engine, JobSpec(trainers=2, grace=7.0)).outcome == "stopped"
    assert engine.calls == ["remove j"] and engine.graces == [7.0]


def test_a_job_must_clean_the_nodes_of_a_cluster_and_not_remove_them(job):
    spec, engine, answers = JobSpec(trainers=2, grace=7.0), RecordingEngine(), []
    clean = engine.down

    def down(grace: float, stopped: Callable[[], bool] = never) -> None:
        clean(grace)
        answers.append(stopped())

    engine.down = down
    job.stops = lambda: 1 + len(engine.graces)  # a second request, while they are cleaned
    job.run(engine, spec, plan(spec, HERE.but(cluster="box"), "j", 29500))
    assert engine.calls == ["adopt", "down"] and engine.graces == [7.0] and answers == [True]


def test_a_job_that_could_not_start_must_report_why_even_if_the_clean_up_fails(job):
    engine = RecordingEngine()
    engine.missing = {"trainer-1"}
    engine.down = raising(EngineError("stuck"))
    with pytest.raises(EngineError, match="no such node"):
        job.run(engine)
    assert job.noted("nodes_left") == [{"error": "stuck"}]


def test_an_outcome_must_be_decided_once_and_kept_for_later_supervisors(job):
    engine = RecordingEngine([KILLED], [[WorkerExit(0, 1)]])
    outcome = job.run(engine, JobSpec(trainers=2, grace=0.01, max_restarts=1))
    ended = job.supervisor.history.ended
    again = RecordingEngine()
    assert job.run(again) == outcome == JobResult(Outcome.FAILED, "max_restarts is 1")
    assert again.calls == ["adopt", "down"]
    assert job.supervisor.history.ended == ended and [end.cause.rank for end in ended] == [1, 0]
    assert job.names()[-2:] == ["nodes_stopping", "nodes_down"]


def test_repeated_failures_must_be_followed_by_a_delay(job):
    job.run(RecordingEngine([KILLED], [KILLED], [ALL_WELL]))
    assert job.noted("restart_decided") == [
        {"restart": True, "why": "restart 1 of 3", "delay": 0.0},
        {"restart": True, "why": "restart 2 of 3", "delay": 1.0},
    ]
    gaps = [next_ - ended for ended, next_ in zip(job.when("generation_ended"), job.when("generation_starting")[1:])]
    assert gaps == pytest.approx([0, 1], abs=0.2)


def test_a_request_to_stop_must_end_the_delay_before_the_next_generation(job):
    spec = JobSpec(trainers=2, grace=0.01, rules=[{"cause": "killed", "action": "ignore"}])
    engine = RecordingEngine([KILLED], [KILLED], [ALL_WELL])
    decided = []

    def stops() -> int:
        if len(job.supervisor.history.ended) == 2:
            decided.append(job.clock.now)
        return int(bool(decided) and job.clock.now > decided[0] + 0.3)

    job.stops = stops
    assert job.run(engine, spec) == JobResult(Outcome.STOPPED, "stopped by the user")
    assert job.clock.now < decided[0] + 0.6
    assert len(engine.plans) == 2


@pytest.mark.parametrize(("requests", "call", "least"), [(1, "stop", 35), (2, "kill", 5)])
def test_nodes_whose_workers_do_not_end_must_be_removed_in_time(job, requests, call, least):
    engine, spec = Unstoppable([]), JobSpec(trainers=2, grace=30.0, gpus="all")
    job.stops = lambda: requests * ("start" in engine.calls)
    on_gpus = plan(spec, HERE.but(gpus=("GPU-0", "GPU-1", "GPU-2")), "j", 29500)  # also get the whole grace period
    assert job.run(engine, spec, on_gpus) == JobResult(Outcome.STOPPED, "stopped by the user")
    assert engine.calls == ["up", "start", call, "discard master trainer-1 trainer-2", "down"]
    assert least <= job.when("workers_lost")[0] < least + 1
    assert job.noted("workers_lost") == [{"ranks": [0, 1, 2]}]


@pytest.mark.parametrize("seconds", [3.0, 7.0])
def test_a_request_to_stop_must_give_failing_workers_on_gpus_no_more_time(job, seconds):
    engine, spec, began = Unstoppable([[WorkerExit(1, 1)]]), JobSpec(trainers=2, grace=30.0, gpus="all"), job.clock.now
    job.stops = lambda: int(job.clock.now > began + seconds)
    on_gpus = plan(spec, HERE.but(gpus=("GPU-0", "GPU-1", "GPU-2")), "j", 29500)
    assert job.run(engine, spec, on_gpus).outcome == "stopped"
    assert engine.calls == ["up", "start", "stop", "kill", "discard master trainer-2", "down"]
    assert 10 <= job.when("workers_lost")[0] < 12.5


def test_workers_that_exceed_max_run_must_be_stopped_once_and_removed_in_time(job):
    engine = Unstoppable([])
    assert job.run(engine, JobSpec(trainers=2, grace=30.0, max_run=10.0)) == JobResult(
        Outcome.STOPPED, "max_run was reached"
    )
    assert job.noted("workers_stopping") == [{"why": "max_run was reached", "kill": False}]
    assert 45 <= job.when("workers_lost")[0] < 46


def test_nodes_that_cannot_be_removed_must_not_keep_the_job_from_ending(job):
    engine = Unstoppable([])
    engine.discard = raising(EngineError("stuck"))
    job.stops = lambda: int("start" in engine.calls)
    assert job.run(engine) == JobResult(Outcome.STOPPED, "stopped by the user")
    assert job.noted("nodes_left") == [{"error": "stuck"}]


def test_workers_killed_by_a_second_request_must_not_be_the_root_cause(job):
    engine = RecordingEngine([[WorkerExit(0, 1)]], stubborn=True)
    job.stops = lambda: 2 * ("stop" in engine.calls)
    outcome = job.run(engine, JobSpec(trainers=2, grace=30.0, max_restarts=0))
    assert outcome == JobResult(Outcome.FAILED, "max_restarts is 0")
    assert engine.calls == ["up", "start", "stop", "kill", "down"]
    assert job.causes() == [(0, "error")]


def test_a_request_to_stop_must_not_hide_an_earlier_failure(job):
    engine = RecordingEngine([KILLED])
    job.stops = lambda: int("stop" in engine.calls)
    assert job.run(engine) == JobResult(Outcome.STOPPED, "stopped by the user")
    assert job.causes() == [(1, "killed")]


def test_a_full_disk_must_not_keep_workers_from_being_stopped(job, monkeypatch):
    engine = RecordingEngine([])
    start = engine.start

    def full(*_, **__) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def start_and_fill(plan, stopped=None) -> None:
        start(plan)
        monkeypatch.setattr(JobFiles, "fence", full)

    engine.start = start_and_fill
    job.stops = lambda: int("start" in engine.calls)
    assert job.run(engine) == JobResult(Outcome.STOPPED, "stopped by the user")
    assert engine.calls == ["up", "start", "stop", "down"]


def test_each_exit_of_a_worker_must_be_recorded_with_whether_it_was_requested(job):
    engine = RecordingEngine(
        [[WorkerExit(2, 137)], [WorkerExit(0, 1, False), WorkerExit(1, 143)]],
        [[WorkerExit(0, 0)], [WorkerExit(0, 0)], ALL_WELL],
    )
    engine.stop = lambda how: None
    assert job.run(engine, JobSpec(trainers=2, grace=5.0)).outcome == "succeeded"
    ends = [(end["rank"], end["node"], end["exit_code"], end["stopping"]) for end in job.noted("worker_ended")]
    assert ends == [
        (2, "trainer-2", 137, False),
        (0, "master", 1, False),
        (1, "trainer-1", 143, True),
        (0, "master", 0, False),  # once, although it was received twice
        (1, "trainer-1", 0, False),
        (2, "trainer-2", 0, False),
    ]


@pytest.mark.parametrize("call", ["up", "start", "down"])
def test_a_job_that_does_not_end_in_time_must_say_what_is_left_and_wait_for_nothing(job, call):
    engine = RecordingEngine([ALL_WELL])
    setattr(engine, call, raising(Abandoned()))
    with pytest.raises(Abandoned):
        job.run(engine)
    assert call == "down" or "down" not in engine.calls
    result = job.supervisor.abandon()
    assert result.outcome == (Outcome.SUCCEEDED if call == "down" else Outcome.STOPPED)
    kinds = [type(event) for event in job.supervisor.emit.events]
    assert result.left and kinds[-1] is events.NodesLeft and kinds.count(events.OutcomeDecided) == 1
