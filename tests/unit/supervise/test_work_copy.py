"""The copy of the code folder, which is made while nodes start."""

import errno
import os
import threading

import pytest
from support.methods import after
from support.plans import HERE, plan
from support.recording import RecordingEngine
from support.scripted import ALL_WELL, Job

from orchestrate.errors import EngineError
from orchestrate.files.work import Copy
from orchestrate.record.outcomes import Outcome, WorkerExit
from orchestrate.spec.spec import JobSpec
from orchestrate.supervise.job_files import JobFiles


def copying(folder):
    """The plan of a job whose workers run in a copy of `folder`."""
    site = HERE.but(code=str(folder), original="/workspace")
    return plan(JobSpec(trainers=2, grace=0.01), site, "j", 29500)


def test_what_was_copied_must_be_known_to_the_next_supervisor(tmp_path, monkeypatch):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text("old")
    (tmp_path / "code" / "key").write_text("hidden")
    job, wanted, user = Job(tmp_path / "runs"), copying(tmp_path / "code"), os.getuid() or 1234
    (job.paths.shared / "work").mkdir()
    engine = RecordingEngine([[WorkerExit(1, 137)]], [ALL_WELL])
    engine.masked = {"key"}
    assert job.run(engine, JobSpec(trainers=2, grace=0.01, user=str(user)), wanted).outcome == Outcome.SUCCEEDED
    assert (job.paths.shared / "work" / "train.py").read_text() == "old"
    assert (job.paths.shared / "work" / "train.py").stat().st_uid == user
    (copied,) = job.noted("code_copied")  # not again at the restart
    assert (copied["files"], copied["bytes"], copied["links"]) == (1, 3, 0)
    (tmp_path / "code" / "train.py").write_text("fixed meanwhile")
    written = JobFiles(job.paths).remove_unchanged_copies(wanted.placement)
    assert written and (written.files, written.complete) == ([], True)
    assert not os.listdir(job.paths.shared / "work")


def test_files_that_workers_cannot_read_must_be_named_before_they_start(tmp_path, monkeypatch):
    class Unreadable(Copy):
        def run(self):
            self.unreadable = {f"data/{number}.bin": [".", "data"] for number in range(5)}

    monkeypatch.setattr("orchestrate.supervise.work_copy.Copy", Unreadable)
    job = Job(tmp_path / "runs")
    assert job.run(RecordingEngine([ALL_WELL]), plan_=copying(tmp_path)).outcome == Outcome.SUCCEEDED
    (warning,) = job.noted("warning_issued")
    assert warning["text"].startswith("workers cannot read data/0.bin, data/1.bin, data/2.bin and 2 more: ")
    assert warning["text"].endswith(("or chmod a+rX . data", "or chmod u+rX . data"))
    assert job.names().index("warning_issued") < job.names().index("generation_starting")


def test_a_copy_must_end_before_the_job_does(tmp_path, monkeypatch):
    class Slow(Copy):
        def run(self):
            for _ in range(3000):
                if self.stopped() or pause.wait(0.01):
                    break
            engine.calls.append("copied" if self.stopped() else "not stopped")

    pause, engine = threading.Event(), RecordingEngine()
    monkeypatch.setattr("orchestrate.supervise.work_copy.Copy", Slow)
    engine.missing = {"trainer-1"}
    with pytest.raises(EngineError):
        Job(tmp_path / "runs").run(engine, plan_=copying(tmp_path))
    assert "copied" in engine.calls and engine.calls.index("copied") < engine.calls.index("down")
    pause.set()


def test_a_request_to_stop_must_cut_a_copy_short(tmp_path, monkeypatch):
    class Slow(Copy):
        def run(self):
            up.wait(30)
            answers.append(self.stopped())

    monkeypatch.setattr("orchestrate.supervise.work_copy.Copy", Slow)
    job, engine, up, answers = Job(tmp_path / "runs"), RecordingEngine(), threading.Event(), []
    engine.up = after(engine.up, up.set)
    job.stops = lambda: int(up.is_set())
    assert job.run(engine, plan_=copying(tmp_path)).outcome == Outcome.STOPPED
    assert answers == [True]


def test_a_copy_must_be_repeated_once_the_disk_has_space(tmp_path, monkeypatch):
    class Full(Copy):
        def run(self):
            if '"disk_full"' not in job.paths.events.read_text():
                raise OSError(errno.ENOSPC, "No space left on device")
            super().run()

    monkeypatch.setattr("orchestrate.supervise.work_copy.Copy", Full)
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").touch()
    job = Job(tmp_path / "runs")
    (job.paths.shared / "work").mkdir()
    assert job.run(RecordingEngine([ALL_WELL]), plan_=copying(tmp_path / "code")).outcome == Outcome.SUCCEEDED
    assert job.names().count("disk_full") == 1 and (job.paths.shared / "work" / "train.py").exists()


@pytest.mark.timeout(60)  # as it waited forever
def test_a_job_must_be_stopped_while_its_copy_waits_for_space(tmp_path, monkeypatch):
    class Full(Copy):
        def run(self):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("orchestrate.supervise.work_copy.Copy", Full)
    job = Job(tmp_path / "runs")
    job.stops = lambda: '"disk_full"' in job.paths.events.read_text()
    assert job.run(RecordingEngine(), plan_=copying(tmp_path)).outcome == Outcome.STOPPED
