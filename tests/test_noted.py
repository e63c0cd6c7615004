"""Checkpoints that workers save must be noted while the job runs, once each, when they are complete."""

from collections.abc import Callable

import pytest
from support.scripted import ALL_WELL, Job

from orchestrate.engines.base import Observed
from orchestrate.engines.recording import RecordingEngine
from orchestrate.job.spec import JobSpec
from orchestrate.supervise import saves

SPEC = JobSpec(trainers=2, grace=0.01, hang_after=0.0)


@pytest.fixture
def job(tmp_path, monkeypatch):
    return Job(tmp_path, monkeypatch)


def playing(job: Job, *actions: Callable[[], object]) -> RecordingEngine:
    """An engine whose workers run for a few seconds: each action is done in a second of its own."""
    engine, due = RecordingEngine([]), [*actions]
    wait = engine.wait

    def act(timeout: float) -> Observed:
        if not engine.running:
            return wait(timeout)
        if due:
            due.pop(0)()
            job.clock.now += 1.5 * saves.INTERVAL
            return wait(timeout)
        return Observed(ALL_WELL)

    engine.wait = act
    return engine


def test_a_checkpoint_must_be_noted_once_when_it_no_longer_changes(job):
    def save(name: str) -> Callable[[], object]:
        return lambda: job.paths.checkpoints.joinpath(name).write_text("x")

    engine = playing(job, save("step-1"), save("step-2.part"), lambda: None, lambda: None, save("step-3"), lambda: None)
    assert job.run(engine, SPEC).outcome == "succeeded"
    assert job.names().count("checkpoint_saved") == 2


def test_the_last_checkpoint_must_be_noted_before_the_generation_ends(job):
    engine = playing(job, lambda: job.paths.checkpoints.joinpath("step-1").touch())
    assert job.run(engine, SPEC).outcome == "succeeded"
    names = job.names()
    assert names.index("checkpoint_saved") == names.index("generation_ended") - 1


def test_checkpoints_of_earlier_generations_and_their_removal_must_not_be_noted(job):
    job.paths.checkpoints.joinpath("step-1").touch()
    engine = playing(job, lambda: None, lambda: job.paths.checkpoints.joinpath("step-1").unlink(), lambda: None)
    assert job.run(engine, SPEC).outcome == "succeeded"
    assert "checkpoint_saved" not in job.names()


def test_a_script_that_always_saves_must_not_fill_the_events(job, monkeypatch):
    monkeypatch.setattr(saves, "MAX_EVENTS", 2)
    paths = [job.paths.checkpoints / f"step-{step}" for step in range(4)]
    actions = [action for path in paths for action in (path.touch, lambda: None)]
    assert job.run(playing(job, *actions), SPEC).outcome == "succeeded"
    assert job.names().count("checkpoint_saved") == 2
