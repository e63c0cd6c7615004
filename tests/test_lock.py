"""A job has one supervisor, and that it lives is the kernel's word."""

import dataclasses

import pytest
from commanded import supervised
from scripted import Scripted
from test_plan import HERE

from orchestrate import job, lock
from orchestrate.errors import UsageError
from orchestrate.paths import JobPaths
from orchestrate.plan import plan
from orchestrate.spec import JobSpec


@pytest.fixture
def other(tmp_path):
    """Another process that supervises the job."""
    held = tmp_path / "held"
    held.mkdir()
    with supervised(held) as process:
        yield process


@pytest.mark.timeout(60)
def test_a_second_supervisor_must_be_told_at_once_who_is_the_first(tmp_path, other):
    paths = JobPaths(tmp_path / "held")
    assert lock.holder(paths) == other.pid
    with pytest.raises(BlockingIOError), lock.held(paths):
        pass


def test_the_end_of_a_supervisor_must_make_room_for_the_next(tmp_path, other):
    paths = JobPaths(tmp_path / "held")
    other.kill()
    other.wait()
    assert lock.holder(paths) == 0
    with lock.held(paths):
        pass


def test_a_job_that_nobody_supervises_must_have_no_holder(tmp_path):
    assert lock.holder(JobPaths(tmp_path)) == 0


def test_a_job_whose_cluster_another_job_has_taken_must_say_so_and_start_nothing(tmp_path, other):
    paths = JobPaths(tmp_path / "j")
    made = plan(JobSpec(), dataclasses.replace(HERE, cluster="held"), "j", 29500)
    job.create(JobSpec(), made, paths)
    engine = Scripted()
    with pytest.raises(UsageError, match="another job has taken held$") as refused:
        job.supervise(paths, engine, lambda: 0, print)
    assert "attach j" in refused.value.hint
    assert not engine.calls


def test_a_lock_that_cannot_be_looked_at_must_have_no_holder(tmp_path):
    paths = JobPaths(tmp_path)
    paths.lock.symlink_to(paths.lock)
    assert lock.holder(paths) == 0
