"""A job with a minimum must continue with fewer nodes, retry lost nodes with a backoff, and not take any back early."""

import pytest
from support.methods import after, before
from support.recording import RecordingEngine
from support.scripted import ALL_WELL, KILLED, AtOnce, WhenAsked

from orchestrate.engines.base import Observed, Stop
from orchestrate.errors import EngineLost
from orchestrate.record.outcomes import JobResult, Outcome, WorkerExit
from orchestrate.spec.spec import JobSpec
from orchestrate.supervise.nodes import REJOIN_INTERVAL


def test_a_job_with_a_minimum_must_continue_with_fewer_nodes_and_take_one_back_at_a_checkpoint(job, monkeypatch):
    monkeypatch.setattr("orchestrate.supervise.nodes.REJOIN_INTERVAL", (0.0, 0.0))
    engine = RecordingEngine([KILLED], [], [ALL_WELL])
    start, saved = engine.start, []

    def play(plan, stopped=None) -> None:
        start(plan)
        engine.missing = {"trainer-1"} if len(engine.plans) == 1 else set()

    def save_when_it_is_back() -> int:
        if not saved and "node_back" in job.paths.events.read_text():
            saved.append(job.paths.checkpoints.joinpath("step-1").touch())
        return 0

    engine.start = play
    job.stops = save_when_it_is_back
    assert job.run(engine, JobSpec(trainers=2, grace=0.01, min_trainers=1, max_restarts=1)).outcome == "succeeded"
    assert [[worker.node for worker in plan.workers] for plan in engine.plans] == [
        ["master", "trainer-1", "trainer-2"],
        ["master", "trainer-2"],
        ["master", "trainer-1", "trainer-2"],
    ]
    assert [ended.outcome for ended in job.supervisor.history.ended] == ["failed", "rescaled", "succeeded"]
    assert job.noted("nodes_missing") == [{"nodes": ["master", "trainer-2"], "missing": 1, "error": "no such node"}]
    assert len(job.noted("node_back")) == 1


def test_a_node_that_is_back_must_not_be_used_before_the_next_checkpoint(job, monkeypatch):
    monkeypatch.setattr("orchestrate.supervise.nodes.REJOIN_INTERVAL", (0.0, 0.0))
    engine = RecordingEngine([KILLED], [])
    start, wait = engine.start, engine.wait

    def play(plan, stopped=None) -> None:
        start(plan)
        engine.missing = {"trainer-1"} if len(engine.plans) == 1 else set()
        if len(engine.plans) == 2:  # a checkpoint from before the node's return does not count
            job.paths.checkpoints.joinpath("step-1").touch()

    def end_when_it_is_back(timeout):
        returned = job.paths.events.read_text().count("node_back")
        ended = returned and 0 in engine.running
        return Observed([WorkerExit(0, 0), WorkerExit(1, 0)]) if ended else wait(timeout)

    engine.start, engine.wait = play, end_when_it_is_back
    assert job.run(engine, JobSpec(trainers=2, grace=0.01, min_trainers=1)).outcome == "succeeded"
    assert [ended.outcome for ended in job.supervisor.history.ended] == ["failed", "succeeded"]
    assert "node_back" in job.names()


def test_fewer_nodes_than_the_minimum_must_fail_the_job(job):
    engine = RecordingEngine([KILLED])
    engine.start = after(engine.start, lambda: engine.missing.update({"trainer-1", "trainer-2"}))
    assert job.run(engine, JobSpec(trainers=2, grace=0.01, min_trainers=1)).outcome == "failed"


def test_a_node_that_does_not_come_back_must_be_retried_with_increasing_delays(job, monkeypatch):
    monkeypatch.setattr("orchestrate.supervise.nodes.ThreadPoolExecutor", AtOnce)
    engine = RecordingEngine([KILLED], [])
    start, up, wait, attempts = engine.start, engine.up, engine.wait, []

    def play(plan, stopped=None) -> None:
        start(plan)
        engine.missing = {"trainer-1"}

    def record(*arguments, **options) -> None:
        attempts.append(job.clock.now)
        up(*arguments, **options)

    engine.start, engine.up = play, record
    engine.wait = lambda timeout: (
        Observed([WorkerExit(0, 0), WorkerExit(1, 0)]) if len(attempts) > 11 and 0 in engine.running else wait(timeout)
    )
    assert job.run(engine, JobSpec(trainers=2, grace=0.01, min_trainers=1, hang_after=0.0)).outcome == "succeeded"
    gaps = [later - sooner for sooner, later in zip(attempts, attempts[1:]) if later - sooner > 5]  # after the restart
    assert gaps[:7] == pytest.approx([10, 20, 40, 80, 160, 300, 300], rel=0.15)
    assert REJOIN_INTERVAL == (10.0, 300.0)


def test_a_job_with_a_minimum_of_no_trainers_must_continue_with_the_master_alone(job):
    engine = RecordingEngine([KILLED], [[WorkerExit(0, 0)]])
    engine.hosts = {"master": "one", "trainer-1": "two"}
    engine.start = after(engine.start, lambda: engine.missing.update({"trainer-1", "trainer-2"}))
    assert job.run(engine, JobSpec(trainers=2, grace=0.01, min_trainers=0)).outcome == "succeeded"
    assert [worker.node for worker in engine.plans[1].workers] == ["master"]
    assert job.noted("nodes_up")[1] == {"nodes": ["master"], "hosts": {"master": "one"}}


def lose_trainer_1(engine: RecordingEngine) -> None:
    """Lose trainer-1 for good in the first generation."""
    engine.start = after(engine.start, lambda: engine.missing.add("trainer-1"))


def test_an_engine_that_stays_unreachable_must_not_be_taken_for_a_missing_node(job):
    engine = RecordingEngine([KILLED], [ALL_WELL])
    up = engine.up

    def unreachable(*arguments, **options) -> None:
        if engine.plans:
            raise EngineLost("gone")
        up(*arguments, **options)

    engine.up = unreachable
    assert job.run(engine, JobSpec(trainers=2, grace=0.01, min_trainers=0)) == JobResult(Outcome.LOST, "gone")
    assert 300 <= job.clock.now - 1_000_000 < 305


def test_the_clean_up_but_no_worker_must_wait_for_an_attempt_to_bring_a_node_back(job, monkeypatch):
    monkeypatch.setattr("orchestrate.supervise.nodes.ThreadPoolExecutor", WhenAsked)
    engine = RecordingEngine([KILLED], [*[[]] * 200, [WorkerExit(0, 0), WorkerExit(1, 0)]])
    lose_trainer_1(engine)
    engine.up = before(engine.up, lambda: engine.calls.append("while they run") if engine.running else None)
    assert job.run(engine, JobSpec(trainers=2, grace=0.01, min_trainers=1)).outcome == "succeeded"
    assert engine.calls == ["up", "start", "stop", "up", "up", "up", "start", "up", "down"]


def test_a_supervisor_that_crashes_must_wait_for_the_node_it_brings_back_before_it_cleans_up(job, monkeypatch):
    monkeypatch.setattr("orchestrate.supervise.nodes.ThreadPoolExecutor", WhenAsked)
    engine = RecordingEngine([KILLED], [[]] * 200)
    lose_trainer_1(engine)
    wait = engine.wait

    def crash_at_the_end(timeout: float) -> Observed:
        if engine.batches or len(engine.plans) == 1:
            return wait(timeout)
        raise KeyError

    engine.wait = crash_at_the_end
    with pytest.raises(KeyError):
        job.run(engine, JobSpec(trainers=2, grace=5.0, min_trainers=1))
    assert engine.calls[-3:] == ["start", "up", "down"]
    assert engine.graces == [0]


def test_a_missing_node_must_not_be_retried_while_another_one_is_in_trouble(job, monkeypatch):
    monkeypatch.setattr("orchestrate.supervise.nodes.ThreadPoolExecutor", AtOnce)
    engine = RecordingEngine([KILLED], [*[[]] * 200, [WorkerExit(0, 0), WorkerExit(1, 0)]])
    lose_trainer_1(engine)
    engine.troubles = lambda: {"trainer-2": "paused"} if len(engine.plans) == 2 else {}
    assert job.run(engine, JobSpec(trainers=2, grace=0.01, min_trainers=1)).outcome == "succeeded"
    assert engine.calls == ["up", "start", "stop", "up", "up", "up", "start", "down"]


def test_a_node_that_came_back_and_is_missing_again_must_not_count_as_back(job, monkeypatch):
    monkeypatch.setattr("orchestrate.supervise.nodes.ThreadPoolExecutor", AtOnce)
    monkeypatch.setattr("orchestrate.supervise.nodes.REJOIN_INTERVAL", (1.0, 1.0))
    two = [*[[]] * 50, [WorkerExit(0, 0), WorkerExit(1, 0)]]
    engine = RecordingEngine([KILLED], [[]] * 50, [KILLED], two)
    start, wait = engine.start, engine.wait

    def play(plan, stopped=None) -> None:
        start(plan)
        engine.missing = set() if len(engine.plans) == 2 else {"trainer-1"}

    def save(timeout):
        job.paths.checkpoints.joinpath(f"step-{job.clock.now}").touch()
        return wait(timeout)

    engine.start, engine.wait = play, save
    assert job.run(engine, JobSpec(trainers=2, grace=0.01, min_trainers=1)).outcome == "succeeded"
    assert [ended.outcome for ended in job.supervisor.history.ended] == ["failed", "rescaled", "failed", "succeeded"]
    assert job.names().count("node_back") == 1


def test_the_delays_must_be_short_again_once_a_node_was_back(job, monkeypatch):
    monkeypatch.setattr("orchestrate.supervise.nodes.ThreadPoolExecutor", AtOnce)
    engine = RecordingEngine([KILLED], [], [KILLED], [])
    up, wait, attempts = engine.up, engine.wait, []

    def come_back_once(*arguments, **options) -> None:
        if len(engine.plans) == 2 and job.clock.now > attempts[0] + 25:
            engine.missing = set()
        attempts.append(job.clock.now)
        engine.calls += ["again"] * (len(engine.plans) == 4)
        up(*arguments, **options)

    def save(timeout):
        job.paths.checkpoints.joinpath(f"step-{job.clock.now}").touch()
        ended = "again" in engine.calls and 0 in engine.running
        return Observed([WorkerExit(0, 0), WorkerExit(1, 0)]) if ended else wait(timeout)

    lose_trainer_1(engine)
    engine.up, engine.wait = come_back_once, save
    assert job.run(engine, JobSpec(trainers=2, grace=0.01, min_trainers=1, hang_after=0.0)).outcome == "succeeded"
    assert [ended.outcome for ended in job.supervisor.history.ended] == ["failed", "rescaled", "failed", "succeeded"]
    assert attempts[-1] - attempts[-2] == pytest.approx(REJOIN_INTERVAL[0], abs=0.5)


@pytest.mark.parametrize(
    ("end", "asked", "word"),
    [(0, False, "rescaled"), (1, True, "rescaled"), (1, False, "failed"), (143, True, "rescaled")],
)
def test_a_worker_that_fails_while_the_gang_is_stopped_for_a_rescale_must_count_as_failed(
    job, monkeypatch, end, asked, word
):
    monkeypatch.setattr("orchestrate.supervise.nodes.ThreadPoolExecutor", AtOnce)
    monkeypatch.setattr("orchestrate.supervise.nodes.REJOIN_INTERVAL", (1.0, 1.0))
    engine = RecordingEngine([KILLED], [], [ALL_WELL])
    start, wait = engine.start, engine.wait

    def play(plan, stopped=None) -> None:
        start(plan)
        engine.missing = {"trainer-1"} if len(engine.plans) == 1 else set()

    def save(timeout):
        job.paths.checkpoints.joinpath(f"step-{job.clock.now}").touch()
        return wait(timeout)

    def stop(how: Stop) -> None:
        engine.batches.append([WorkerExit(0, 143), WorkerExit(1, end, asked), WorkerExit(2, 143)])

    engine.start, engine.wait, engine.stop = play, save, stop
    assert job.run(engine, JobSpec(trainers=2, grace=0.01, min_trainers=1)).outcome == "succeeded"
    assert [ended.outcome for ended in job.supervisor.history.ended] == ["failed", word, "succeeded"]
