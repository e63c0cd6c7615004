"""A job that may go on with fewer nodes must do so, try in vain less and less often, and take none in too early."""

from concurrent.futures import Future

import pytest
from scripted import ALL_WELL, KILLED, Job, Scripted

from orchestrate.engines import Exit
from orchestrate.spec import JobSpec
from orchestrate.supervisor import REJOIN


@pytest.fixture
def job(tmp_path, monkeypatch):
    return Job(tmp_path, monkeypatch)


def test_a_job_with_a_minimum_must_go_on_with_fewer_nodes_and_take_one_in_again_after_a_checkpoint(job, monkeypatch):
    monkeypatch.setattr("orchestrate.supervisor.REJOIN", (0.0, 0.0))
    engine = Scripted([KILLED], [], [ALL_WELL])
    start, saved = engine.start, []

    def play(workers, command) -> None:
        start(workers, command)
        engine.missing = {"trainer-1"} if len(engine.plans) == 1 else set()

    def save_when_it_is_back() -> int:
        if not saved and "node_back" in job.paths.events.read_text():
            saved.append(job.paths.checkpoints.joinpath("step-1").touch())
        return 0

    engine.start = play
    job.stops = save_when_it_is_back
    assert job.run(engine, JobSpec(trainers=2, grace=0.01, min_trainers=1, max_restarts=1)).word == "succeeded"
    assert [[worker.node for worker in workers] for workers in engine.plans] == [
        ["master", "trainer-1", "trainer-2"],
        ["master", "trainer-2"],
        ["master", "trainer-1", "trainer-2"],
    ]
    assert [ended.word for ended in job.supervisor.history.ended] == ["failed", "rescaled", "succeeded"]


def test_a_node_that_is_back_must_not_be_taken_in_before_a_checkpoint(job, monkeypatch):
    monkeypatch.setattr("orchestrate.supervisor.REJOIN", (0.0, 0.0))
    engine = Scripted([KILLED], [])
    start, wait = engine.start, engine.wait

    def play(workers, command) -> None:
        start(workers, command)
        engine.missing = {"trainer-1"} if len(engine.plans) == 1 else set()
        if len(engine.plans) == 2:  # one that is older than the node's return says nothing
            job.paths.checkpoints.joinpath("step-1").touch()

    def end_when_it_is_back(timeout):
        looks = job.paths.events.read_text().count("node_back")
        return wait(timeout) or ([Exit(0, 0), Exit(1, 0)] if looks and 0 in engine.running else [])

    engine.start, engine.wait = play, end_when_it_is_back
    assert job.run(engine, JobSpec(trainers=2, grace=0.01, min_trainers=1)).word == "succeeded"
    assert [ended.word for ended in job.supervisor.history.ended] == ["failed", "succeeded"]
    assert "node_back" in job.names()


def test_fewer_nodes_than_the_minimum_must_fail_the_job(job):
    engine = Scripted([KILLED])
    start = engine.start
    engine.start = lambda *arguments: (start(*arguments), engine.missing.update({"trainer-1", "trainer-2"}))
    assert job.run(engine, JobSpec(trainers=2, grace=0.01, min_trainers=1)).word == "failed"


class AtOnce:
    """A pool whose work is done when it is handed in, so that no time passes meanwhile."""

    def __init__(self, threads: int) -> None:
        pass

    def submit(self, action, *arguments) -> Future:
        done = Future()
        try:
            done.set_result(action(*arguments))
        except Exception as error:
            done.set_exception(error)
        return done


def test_a_node_that_does_not_come_back_must_be_tried_again_less_and_less_often(job, monkeypatch):
    monkeypatch.setattr("orchestrate.supervisor.ThreadPoolExecutor", AtOnce)
    engine = Scripted([KILLED], [])
    start, up, wait, tried = engine.start, engine.up, engine.wait, []

    def play(workers, command) -> None:
        start(workers, command)
        engine.missing = {"trainer-1"}

    def note(*arguments) -> None:
        tried.append(job.clock.now)
        up(*arguments)

    engine.start, engine.up = play, note
    engine.wait = lambda timeout: wait(timeout) or [Exit(0, 0), Exit(1, 0)] * (len(tried) > 11 and 0 in engine.running)
    assert job.run(engine, JobSpec(trainers=2, grace=0.01, min_trainers=1, hang_after=0.0)).word == "succeeded"
    gaps = [later - sooner for sooner, later in zip(tried, tried[1:]) if later - sooner > 5]  # after the restart itself
    assert gaps[:7] == pytest.approx([10, 20, 40, 80, 160, 300, 300], rel=0.15)
    assert REJOIN == (10.0, 300.0)
