"""Checkpoints that workers save must be noted while the job runs, once each, when they are complete."""

import os
from collections.abc import Callable

from support.plans import HERE, plan
from support.recording import RecordingEngine
from support.scripted import ALL_WELL, Job

from orchestrate.engines.base import Observed
from orchestrate.record.recorder import Recorder
from orchestrate.spec.spec import JobSpec
from orchestrate.supervise import checkpoint_events
from orchestrate.supervise.context import JobContext
from orchestrate.supervise.job_files import JobFiles

SPEC = JobSpec(trainers=2, grace=0.01, hang_after=0.0)


def playing(job: Job, *actions: Callable[[], object]) -> RecordingEngine:
    """An engine whose workers run for a few seconds: each action is done in a second of its own."""
    engine, due = RecordingEngine([]), [*actions]
    wait = engine.wait

    def act(timeout: float) -> Observed:
        if not engine.running:
            return wait(timeout)
        if due:
            due.pop(0)()
            job.clock.now += 1.5 * checkpoint_events.INTERVAL
            return wait(timeout)
        return Observed(ALL_WELL)

    engine.wait = act
    return engine


def save(job: Job, name: str) -> Callable[[], object]:
    def write() -> None:
        path = job.paths.checkpoints / name
        path.touch()
        os.utime(path, (job.clock.now,) * 2)  # of the job's clock, because several files are written at once

    return write


def nothing() -> None:
    pass


def test_files_that_are_written_one_after_the_other_must_be_one_checkpoint(job):
    first, second = (save(job, name) for name in ("model", "optimizer"))
    engine = playing(job, first, second, *[nothing] * 3, save(job, "other"), *[nothing] * 3)
    assert job.run(engine, SPEC).outcome == "succeeded"
    assert job.names().count("checkpoint_saved") == 2


def test_a_file_that_always_changes_must_be_noted_from_time_to_time(job):
    assert job.run(playing(job, *[save(job, "latest")] * 20), SPEC).outcome == "succeeded"
    assert 2 <= job.names().count("checkpoint_saved") <= 4  # in 30 s, and at the end


def test_the_last_checkpoint_must_be_noted_before_the_generation_ends(job):
    assert job.run(playing(job, save(job, "step-1")), SPEC).outcome == "succeeded"
    names = job.names()
    assert names.index("checkpoint_saved") == names.index("generation_ended") - 1


def test_checkpoints_of_earlier_generations_and_their_removal_must_not_be_noted(job):
    for name in ("step-1", "step-2"):
        save(job, name)()
    engine = playing(job, nothing, job.paths.checkpoints.joinpath("step-1").unlink, *[nothing] * 4)
    assert job.run(engine, SPEC).outcome == "succeeded"
    assert "checkpoint_saved" not in job.names()


def test_a_script_that_saves_often_must_not_fill_the_events_and_its_last_one_must_be_known(job, monkeypatch):
    monkeypatch.setattr(checkpoint_events, "SPACING", 10)
    actions = [action for step in range(100) for action in (save(job, f"step-{step}"), nothing, nothing)]
    assert job.run(playing(job, *actions), SPEC).outcome == "succeeded"
    found = job.when("checkpoint_saved")
    assert 10 < len(found) < 60 and found[-1] > 440
    gaps = [later - sooner for sooner, later in zip(found, found[1:])]
    assert max(gaps) < 60 and sorted(gaps)[-5:] > sorted(gaps)[:5]


def test_a_folder_that_takes_long_to_list_must_be_listed_rarely(job):
    class Slow(JobFiles):
        def saved(self) -> tuple[tuple[str, int], ...]:
            listed.append(job.clock.now)
            job.clock.sleep(0.4)
            return super().saved()

    listed: list[float] = []
    emit, files = Recorder(job.paths.events, clock=job.clock), Slow(job.paths)
    running = JobContext(
        spec=SPEC, stored_plan=plan(SPEC, HERE, "j"), run=job.paths.shared, engine=RecordingEngine(), emit=emit,
        stops=lambda: 0, files=files,
    )  # fmt: skip
    looks = checkpoint_events.Saves(running)
    for _ in range(600):
        looks.step()
        job.clock.sleep(0.1)
    assert len(listed) == 5  # a fiftieth of the time: at first, and every twenty seconds
    emit.close()
