"""A job must end at its time limit, or if its record is full, whatever it waits for; on a scripted engine."""

import errno

import pytest
from support.recording import RecordingEngine
from support.scripted import KILLED

from orchestrate.errors import EngineError
from orchestrate.record import recorder
from orchestrate.record.outcomes import JobResult, Outcome
from orchestrate.spec.spec import JobSpec
from orchestrate.supervise.context import STOPPING_TIMEOUT
from orchestrate.supervise.open_stores import NoCopies

STOPPED = JobResult(Outcome.STOPPED, "max_run was reached")
SPEC = JobSpec(trainers=2, grace=1.0, max_run=30.0)


class Waiting(RecordingEngine):
    """An engine of which one method waits until it is to stop, from the call of a number on."""

    def __init__(self, job, method: str, number: int, *generations: list) -> None:
        super().__init__(*generations)
        original, self.job, self.asked = getattr(self, method), job, 0

        def wait(*arguments) -> None:
            self.asked += 1
            if self.asked < number:
                return original(*arguments)
            *_, stopped = arguments
            while not stopped():
                job.clock.sleep(1.0)
            if method == "up":
                raise EngineError("not all nodes did start")
            original(*arguments)

        setattr(self, method, wait)


@pytest.mark.parametrize(("method", "number"), [("up", 1), ("up", 2), ("gather", 1), ("start", 1), ("start", 2)])
def test_a_wait_for_nodes_and_their_files_must_end(job, method, number):
    began, engine = job.clock.now, Waiting(job, method, number, [KILLED], [])
    assert job.run(engine, SPEC) == STOPPED
    assert 30 <= job.clock.now - began < 33 and engine.calls[-1] == "down"


def test_a_request_to_stop_must_end_the_start_of_workers(job):
    engine = Waiting(job, "start", 1, [])
    job.stops = lambda: int(job.clock.now > 1_000_010)
    assert job.run(engine, JobSpec(trainers=2, grace=1.0)) == JobResult(Outcome.STOPPED, "stopped by the user")


@pytest.mark.parametrize("seconds", [0.35, 0.6])  # reached when the workers fail, and while the job waits
def test_the_delay_before_a_restart_must_end(job, seconds):
    began, engine = job.clock.now, RecordingEngine(*[[KILLED]] * 9)
    assert job.run(engine, JobSpec(trainers=2, max_run=seconds)) == STOPPED
    assert job.noted("restart_decided")[-1]["delay"] == 1.0
    assert job.clock.now - began < 0.8


def test_fetching_of_checkpoints_must_end(job):
    class Endless(NoCopies):
        def begin(self, stopped) -> None:
            while not stopped():
                job.clock.sleep(1.0)

    engine = RecordingEngine([])
    assert job.run(engine, SPEC, copies=Endless()) == STOPPED
    assert "start" not in engine.calls


def test_a_full_disk_must_not_keep_a_job(job):
    def gather(stopped) -> None:
        job.clock.sleep(7.0)  # the limit is reached meanwhile
        raise OSError(errno.ENOSPC, "No space left on device")

    began, engine = job.clock.now, RecordingEngine([KILLED], [])
    engine.gather = gather
    assert job.run(engine, SPEC) == STOPPED
    assert 30 < job.clock.now - began < 30 + STOPPING_TIMEOUT + 2 * 8


def test_a_job_whose_record_is_full_must_end(job, monkeypatch):
    monkeypatch.setattr(recorder, "FULL", 100)
    assert job.run(RecordingEngine([KILLED])) == JobResult(Outcome.FAILED, "its record is full")
