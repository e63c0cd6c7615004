"""What a job that is resumed knows of the time before; on a scripted engine."""

import pytest
from support.recording import RecordingEngine
from support.scripted import ALL_WELL, Clock, Job

from orchestrate.errors import EngineError
from orchestrate.record import events
from orchestrate.record.history import History
from orchestrate.record.outcomes import GenerationResult, Outcome, WorkerExit
from orchestrate.record.recorder import Recorder
from orchestrate.spec.spec import JobSpec


def test_a_resumed_job_must_have_its_restart_budget_again(tmp_path):
    failure = [[[WorkerExit(1, 1)]], [[WorkerExit(0, 1)]]]
    job = Job(tmp_path)
    spec = JobSpec(trainers=2, grace=0.01, max_restarts=1)
    assert job.run(RecordingEngine(*failure), spec).why == "max_restarts is 1"
    emit = Recorder(job.paths.events)
    emit(events.JobEnded(Outcome.FAILED, "max_restarts is 1"))
    emit(events.JobResumed())
    emit.close()
    done = job.run(RecordingEngine(*failure[:1], [[WorkerExit(rank, 0) for rank in range(3)]]), spec)
    assert done.outcome == Outcome.SUCCEEDED
    assert [each["generation"] for each in job.noted("generation_starting")] == [0, 1, 2, 3]


def test_a_resumed_job_must_start_with_all_nodes(job):
    spec = JobSpec(trainers=2, grace=0.01, max_restarts=0, min_trainers=1)
    assert job.run(RecordingEngine([[WorkerExit(1, 1)]]), spec).outcome == "failed"
    emit = Recorder(job.paths.events, clock=job.clock)
    emit(events.JobResumed())
    emit.close()
    engine = RecordingEngine()
    engine.missing = {"trainer-1"}
    with pytest.raises(EngineError, match="no such node"):
        job.run(engine, spec)
    assert job.noted("outcome_decided")[-1]["reason"] == "could not start: no such node"
    assert engine.calls == ["up", "down"]


def test_the_time_limit_must_count_from_the_resumption(job):
    spec = JobSpec(trainers=2, grace=0.01, max_run=100.0, max_restarts=0)
    working = [[]] * 900  # for 90 s
    assert job.run(RecordingEngine([*working, [WorkerExit(1, 1)]]), spec).why == "max_restarts is 0"
    emit = Recorder(job.paths.events, clock=job.clock)
    emit(events.JobEnded(Outcome.FAILED, "max_restarts is 0"))
    emit(events.JobResumed())
    emit.close()
    assert job.run(RecordingEngine([*working, ALL_WELL]), spec).outcome == Outcome.SUCCEEDED
    assert 180 < job.when("outcome_decided")[-1] < 200


def test_time_between_end_and_resumption_must_not_count(tmp_path):
    path, clock = tmp_path / "events.jsonl", Clock()
    for event, passes in [
        (events.SupervisorStarted("j"), 7),
        (events.JobEnded(Outcome.FAILED, ""), 500),
        (events.JobResumed(), 3),
        (events.JobEnded(Outcome.FAILED, ""), 90),
        (events.JobResumed(), 4),
        (events.SupervisorStarted("j"), 2),
    ]:
        emit = Recorder(path, clock=clock)
        emit(event)
        emit.close()
        clock.sleep(passes)
    emit = Recorder(path, clock=clock)
    assert [event.seconds for event in emit.events] == [0, 7, 7, 10, 10, 14]
    assert emit.seconds() == 16
    emit.close()
    assert History(emit.events).since == 10


def test_the_state_of_a_resumed_job_must_know_what_came_before():
    ended = events.GenerationEnded(generation=4, outcome=Outcome.FAILED, why="")
    past = [ended, events.OutcomeDecided(Outcome.FAILED, ""), events.JobEnded(Outcome.FAILED, "")]
    history = History([*past, events.JobResumed()])
    assert (history.outcome, history.recent, len(history.ended)) == (None, [], 1)
    assert isinstance(History([*past, events.JobResumed(), ended]).recent[0], GenerationResult)


def test_a_resumed_job_must_not_continue_a_generation_whose_end_was_not_recorded():
    """Its supervisor was killed, and `stop` has removed its nodes."""
    starting = events.GenerationStarting(generation=4, nodes=("master",), world_size=1, master_port=1)
    lost = [starting, events.WorkersStopping("stopped by the user", kill=False), events.JobEnded(Outcome.STOPPED, "")]
    history = History([*lost, events.JobResumed()])
    assert (history.running, history.stopping, history.exits, history.next) == (-1, "", [], 5)
