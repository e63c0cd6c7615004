"""The supervisor must wait for an engine that goes away while workers run, and ask it again; on a scripted engine."""

import pytest
from support.methods import before, raising
from support.recording import RecordingEngine
from support.scripted import ALL_WELL, KILLED, Job

from orchestrate.errors import EngineError, EngineLost
from orchestrate.record.outcomes import JobResult, Outcome, WorkerExit
from orchestrate.spec.spec import JobSpec


class Leaving(RecordingEngine):
    """An engine that is away once, for `seconds`, from when `leaves` is first true."""

    def __init__(self, job: Job, seconds: float, *generations: list[list[WorkerExit]]) -> None:
        super().__init__(*generations)
        self.job, self.seconds, self.left = job, seconds, 0.0

    def leaves(self) -> bool:
        return True

    def wait(self, timeout):
        if not self.left and self.leaves():
            self.left = self.job.clock.now
            raise EngineLost("gone")
        return super().wait(timeout)

    def adopt(self, *arguments):
        if self.job.clock.now < self.left + self.seconds:
            raise EngineLost("gone")
        return super().adopt(*arguments)


@pytest.mark.parametrize(("seconds", "word"), [(290, "succeeded"), (310, "lost")])
def test_a_job_must_wait_some_minutes_for_an_engine_that_is_away(job, seconds, word):
    engine = Leaving(job, seconds, [], [ALL_WELL])
    assert job.run(engine).outcome == word
    assert job.noted("engine_lost") == [{"error": "gone"}]


def test_a_node_that_does_not_answer_when_the_engine_is_back_must_be_retried(job):
    engine = Leaving(job, 0, [], [ALL_WELL])
    adopt, failures = engine.adopt, [EngineError("trainer-1 does not respond")]

    def fail_once(*arguments):
        if failures:
            raise failures.pop()
        return adopt(*arguments)

    engine.adopt = fail_once
    assert job.run(engine) == JobResult(Outcome.SUCCEEDED, "finished")


@pytest.mark.parametrize(("times", "word"), [(40, "succeeded"), (60, "lost")])
def test_an_engine_that_keeps_going_away_must_lose_the_job(job, times, word):
    engine = RecordingEngine([], *[[]] * (times - 1), [ALL_WELL])
    wait = engine.wait

    def leave(timeout):
        if engine.calls.count("adopt") < times:
            raise EngineLost("gone")
        return wait(timeout)

    engine.wait = leave
    assert job.run(engine).outcome == word


@pytest.mark.parametrize("takes", [0, 5])
@pytest.mark.parametrize("asked", [True, False])
def test_a_request_to_stop_while_the_engine_is_away_must_end_the_wait(job, takes, asked):
    """Or the end of `max_run`; also while nodes are asked, which may take long."""
    engine, began = Leaving(job, 1000, []), job.clock.now
    engine.adopt = before(engine.adopt, lambda: job.clock.sleep(takes))
    job.stops = lambda: int(asked and job.clock.now > began + 20)
    assert job.run(engine, JobSpec(trainers=2, grace=0.01, max_run=3600 if asked else 20)).outcome == "lost"
    assert job.clock.now < began + 26


def test_a_stop_interrupted_by_a_lost_engine_must_be_repeated_with_its_grace_period(job):
    class LeavingOnStop(Leaving):
        def leaves(self) -> bool:
            return "stop" in self.calls

    engine = LeavingOnStop(job, 100, [], [[], []])
    job.stops = lambda: int("start" in engine.calls)
    assert job.run(engine, JobSpec(trainers=2, grace=1.0)) == JobResult(Outcome.STOPPED, "stopped by the user")
    assert engine.calls == ["up", "start", "stop", "adopt", "stop", "down"]


@pytest.mark.parametrize("lost", [True, False])
@pytest.mark.parametrize("known", ["node lost", "node stopped", "host lost", "out of memory"])
def test_a_node_lost_with_the_engine_must_not_be_blamed(job, lost, known):
    engine = Leaving(job, 1, [], [KILLED], [ALL_WELL]) if lost else RecordingEngine([KILLED], [ALL_WELL])
    engine.explain = lambda end, node: known
    assert job.run(engine).outcome == "succeeded"
    assert job.causes() == [(1, "engine lost" if lost and known != "out of memory" else known)]


def test_a_worker_that_ended_before_the_engine_went_away_must_not_count_as_lost(job):
    engine = Leaving(job, 1, [[WorkerExit(1, 0)]], [[WorkerExit(0, 0), WorkerExit(2, 0)]])
    engine.leaves = lambda: 1 not in engine.running
    adopt = engine.adopt
    engine.adopt = lambda *arguments: adopt(*arguments) | {1}
    assert job.run(engine) == JobResult(Outcome.SUCCEEDED, "finished")
    assert len(job.supervisor.history.ended) == 1


def test_an_engine_that_comes_back_must_be_asked_which_workers_it_still_has(job):
    engine = RecordingEngine([[]], [ALL_WELL])
    wait = engine.wait

    def wait_once(timeout):
        engine.wait = wait
        raise EngineLost("gone")

    engine.wait = wait_once
    assert job.run(engine) == JobResult(Outcome.SUCCEEDED, "finished")
    assert engine.calls == ["up", "start", "adopt", "down"]
    assert job.names().count("engine_lost") == job.names().count("engine_back") == 1


def test_an_engine_that_does_not_come_back_must_lose_the_job(job, monkeypatch):
    for module in ("supervise.context", "supervise.generation"):
        monkeypatch.setattr(f"orchestrate.{module}.ENGINE_TIMEOUT", 0.6)
    engine = RecordingEngine([])
    engine.wait = raising(EngineLost("gone"))
    engine.adopt = raising(EngineLost("gone"))
    assert job.run(engine) == JobResult(Outcome.LOST, "gone")
    assert engine.calls == ["up", "start", "down"]


def test_workers_lost_with_the_engine_must_not_count_as_restarts(job):
    engine = RecordingEngine([KILLED], [ALL_WELL])
    engine.explain = raising(EngineLost("gone"))
    assert job.run(engine, JobSpec(trainers=2, grace=0.01, max_restarts=0)).outcome == "succeeded"
    assert job.causes() == [(1, "engine lost")]


def test_an_engine_that_goes_away_while_the_workers_start_must_not_fail_the_job(job):
    engine = RecordingEngine([], [], [ALL_WELL])
    start, adopt = engine.start, engine.adopt

    def start_half(plan, stopped=None) -> None:
        start(plan)
        engine.start = start
        raise EngineLost("gone")

    engine.start = start_half
    engine.adopt = lambda *arguments: adopt(*arguments) | {1, 2}
    assert job.run(engine, JobSpec(trainers=2, grace=0.01, max_restarts=0)).outcome == "succeeded"
    assert {cause for _, cause in job.causes()} == {"engine lost"}
