"""Jobs with object stores: checkpoints survive the machine, and output is copied at the end."""

import contextlib
import json
import os
import re
import signal

import pytest
from support.cli import Cli
from support.faults import Background
from support.waiting import eventually

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
