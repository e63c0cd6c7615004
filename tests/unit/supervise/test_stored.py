"""Jobs with object stores, on a scripted engine."""

import contextlib
import json
import os
import re
import signal

import pytest
from support.cli import Cli
from support.faults import Background
from support.object_stores import Saved
from support.recording import RecordingEngine
from support.scripted import Job
from support.waiting import eventually

from orchestrate.errors import StorageError
from orchestrate.files.folder import Folder
from orchestrate.files.paths import JobPaths
from orchestrate.job import events
from orchestrate.job.recorder import Recorder
from orchestrate.job.spec import JobSpec
from orchestrate.storage.output import upload
from orchestrate.storage.store import open_store
from orchestrate.supervise.stored import Stored
from orchestrate.supervise.stores import Stores

URL = "s3://bucket/digits"


@pytest.fixture
def s3(rclone, tmp_path):
    """A server of S3, and the folder with the copies; commands get its address from the environment."""
    rclone.copies = tmp_path / "served" / "bucket" / "digits"
    return rclone


@pytest.fixture
def machines(s3, tmp_path):
    """The command line on two machines, which share nothing but the object store."""
    found = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        found.append(Cli(tmp_path / name))
    yield found
    for each in found:
        each.clean()


def copied(s3) -> int:
    """The step of rank 0's checkpoint in the newest complete copy; 0 if there is none."""
    for path in sorted(s3.copies.glob("manifests/*.json"))[-1:]:
        with contextlib.suppress(ValueError, OSError):  # being written
            entries = json.loads(path.read_text())["manifest"]["files"]
            keys = [entry["key"] for entry in entries if entry["path"] == "rank-0"]
            return int((s3.copies / keys[0]).read_text()) if keys else 0
    return 0


@pytest.mark.slow
def test_a_job_must_go_on_on_another_machine_if_its_own_is_lost(nothing_left, machines, s3):
    one, two = machines
    options = ("--checkpoints", URL, "--output", f"{URL}-output", "count.py", "until-asked", "0.1")
    job = Background(one, "process", *options, trainers=1)
    eventually(lambda: copied(s3) >= 10)
    s3.kill()
    job.until("warning_issued")
    step = job.steps(0)[-1][0]
    eventually(lambda: job.steps(0)[-1][0] > step + 5)  # training continues
    s3.start()
    eventually(lambda: copied(s3) > step)
    job.process.send_signal(signal.SIGKILL)
    for worker in re.findall(r"^pid (\d+)", one.log(0) + one.log(1), re.M):
        os.kill(int(worker), signal.SIGKILL)
    job.end()
    one.clean()

    again = Background(two, "process", *options, trainers=1)
    again.until("generation_started")
    two.finish_jobs()
    assert again.end() == 0, again.err
    name = one.run_dir().name
    assert f"fetched 2 files of checkpoints that {name} copied to {URL}\n" in again.err
    first = again.steps(0)[0][0]
    assert first > step and first % 10 == 1
    report = two.report()
    copies = {copy["what"]: copy for copy in report["copies"]}
    assert {what: (copy["error"], copy["skipped"]) for what, copy in copies.items()} == {
        "checkpoints": ("", []),
        "output": ("", []),
    }
    assert f"checkpoints copied to {URL}\noutput copied to {URL}-output/{two.run_dir().name}\n" in again.err
    output = s3.copies.with_name("digits-output") / two.run_dir().name
    names = {str(path.relative_to(output)) for path in output.rglob("*") if path.is_file()}
    for name in ("report.json", "report.html", "events.jsonl", "job.yaml", "plan.json"):
        assert (output / "orchestrate" / name).read_bytes() == (two.run_dir() / name).read_bytes()
        names.remove(f"orchestrate/{name}")
    per_rank = {
        f"{name}-{rank}{end}" for name, end in (("checkpoints/rank", ""), ("logs/rank", ".log")) for rank in (0, 1)
    }
    assert names == per_rank | {"metrics.jsonl", "finish"}
    assert (output / "logs" / "rank-0.log").read_text() == two.log(0)
    assert not job.events("checkpoints_fetched") and "outcome" not in json.dumps(job.events("warning_issued"))


def test_a_store_that_refuses_the_job_must_end_it_before_it_starts(nothing_left, machines, s3):
    cli = machines[0]
    run = ("run", "--engine", "process", "--gpus", "none", "--checkpoints", URL, "count.py", "5")
    done = cli(*run, AWS_SECRET_ACCESS_KEY="not-the-right-one")
    assert done.returncode == 3
    assert f"error: {URL}: access denied" in done.stderr
    assert "hint: check AWS_ACCESS_KEY_ID" in done.stderr
    assert "not-the-right-one" not in done.stderr
    assert not (cli.folder / "runs").exists() and "rank 0" not in done.stderr


def test_a_copy_that_a_takeover_continues_must_not_fetch_under_running_workers(nothing_left, machines, s3):
    cli = machines[0]
    job = Background(cli, "process", "--checkpoints", URL, "count.py", "until-asked", "0.1", trainers=0)
    eventually(lambda: copied(s3) >= 10)
    job.process.kill()
    job.end()
    cli.finish_jobs()
    done = cli("attach")
    assert done.returncode == 0, done.stderr
    assert not job.events("checkpoints_fetched")
    assert f"checkpoints copied to {URL}\n" in done.stderr
    assert copied(s3) == job.steps(0)[-1][0]


def test_two_jobs_must_not_copy_to_the_same_place_at_once(nothing_left, machines, s3):
    one, two = machines
    job = Background(one, "process", "--checkpoints", URL, "count.py", "until-asked", "0.1", trainers=0)
    eventually(lambda: copied(s3) >= 10)
    other = Background(two, "process", "--checkpoints", URL, "count.py", "until-asked", "0.1", trainers=0)
    text = f"checkpoints are not copied: {URL}: job "
    issued = [job, other]
    eventually(lambda: any(text in event["text"] for each in issued for event in each.events("warning_issued")))
    for cli, each in ((one, job), (two, other)):
        cli.finish_jobs()
        assert each.end() == 0, each.err
    assert f"warning: checkpoints not copied completely to {URL}" in job.err + other.err


def test_nodes_must_be_removed_if_the_store_fails_when_a_job_is_taken_over(tmp_path, monkeypatch):
    class Failing(Stores):
        def begin(self):
            raise StorageError("access denied")

    job = Job(tmp_path)
    before = Recorder(job.paths.events)
    before(events.GenerationStarting(0, ("master",), 1, 29500))
    before.close()
    with pytest.raises(StorageError):
        job.run(RecordingEngine(), stores=Failing())
    assert job.noted("nodes_down")


def test_a_file_that_the_store_refuses_must_keep_no_other_from_being_copied(tmp_path):
    job, out = tmp_path / "run" / "job", tmp_path / "out"
    job.mkdir(parents=True)
    for name in ("a\x01", "a\n", "b#1", *map(str, range(20))):
        (job / name).write_text(name)
    store, done = open_store(out.as_uri()), set()
    with pytest.raises(StorageError, match="b#1"):
        upload(store, Folder(job.parent, "job"), "j", done, lambda: False)
    assert sorted(path.name for path in out.glob("j/*")) == sorted(done) == sorted(map(str, range(20)))
    (job / "b#1").unlink()
    skipped = upload(store, Folder(job.parent, "job"), "j", done, lambda: False)
    assert set(skipped.values()) == {"its name has characters that cannot be printed"} and len(skipped) == 2


def test_a_job_whose_nodes_may_still_write_must_not_be_copied_as_complete(tmp_path):
    """Waiting for the end of writing would take as long as they write."""
    job = Saved(tmp_path / "run")
    job.write("last.pt", b"weights")
    spec = JobSpec(checkpoints=f"file://{tmp_path}/store", output=f"file://{tmp_path}/output")
    emit = Recorder(tmp_path / "events.jsonl")
    stored = Stored(spec, JobPaths(tmp_path / "run"), lambda: 0, emit)
    stored.begin()
    copies = stored.end(quiet=False)
    emit.close()
    assert [(copy.what, copy.error) for copy in copies] == [
        ("checkpoints", "nodes may still write"),
        ("output", "nodes may still write"),
    ]
    assert not list((tmp_path / "output").glob("*"))
