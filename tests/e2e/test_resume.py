"""A job that was stopped or failed continues in its run directory, from its last checkpoint."""

import json
import os
import signal
import subprocess
import sys
import textwrap

import pytest
from support.faults import Background
from support.waiting import eventually

from orchestrate.record import lock
from orchestrate.record.paths import JobPaths

FAILS = textwrap.dedent("""
    import os, pathlib, sys
    saved, note = pathlib.Path(os.environ["JOB_DIR"], "checkpoints", "step"), pathlib.Path("note")
    generation = os.environ["TORCHELASTIC_RESTART_COUNT"]
    print("generation", generation, "saved", saved.exists(), "note", note.exists())
    if os.environ["RANK"] == "0":
        saved.write_text("1")
        note.write_text(generation)
    sys.exit(3)
""")


@pytest.mark.any_engine
def test_a_stopped_job_must_go_on_from_its_checkpoint(cli, engine):
    job = Background(cli, engine, "--", "count.py", "until-asked")
    job.until_step(12, rank=2)
    job.process.send_signal(signal.SIGINT)
    assert job.end() == 130
    run = f"runs/{cli.run_dir().name}"
    assert job.err.splitlines()[-2:] == [
        f"hint: python -m orchestrate resume {run} continues from its last checkpoint",
        run,
    ]
    before, stopped = {rank: job.steps(rank)[-1][0] for rank in range(3)}, cli.report()
    again = cli.start("resume")
    eventually(lambda: all(len(job.steps(rank)) > before[rank] + 5 for rank in range(3)) or again.poll())
    assert cli("resume", run).returncode == 2  # while it runs
    cli.finish_jobs()
    out, err = again.communicate()
    assert again.returncode == 0, err
    for rank in range(3):
        assert [step for step, _ in job.steps(rank)] == [*range(1, len(job.steps(rank)) + 1)]
        assert {generation for step, generation in job.steps(rank) if step > before[rank]} == {1}
    assert " in 0" not in out  # what the first run has already shown
    assert err.splitlines()[-1] == run
    report = cli.report()
    assert (report["outcome"], report["generations"]) == ("succeeded", 2)
    assert report["duration_s"] > stopped["duration_s"]
    seconds = [event["seconds"] for event in job.events()]
    assert seconds == sorted(seconds)


def test_a_failed_job_must_run_changed_code_with_the_files_that_it_wrote(cli, engine):
    (cli.folder / "train.py").write_text(FAILS)
    run = ("--engine", engine, "--trainers", "0", "--gpus", "none", "--set", "max_restarts=1")
    assert cli("run", *run, "train.py").returncode == 1
    (cli.folder / "train.py").write_text(FAILS.replace("sys.exit(3)", "sys.exit(generation == '2')"))
    done = cli("resume", "latest")
    assert done.returncode == 0, done.stderr
    assert "restarting all workers (restart 1 of 1)" in done.stderr  # the restart budget starts again
    lines = [line for line in cli.log(0).splitlines() if line.startswith("generation")]
    assert [line.split()[1] for line in lines] == ["0", "1", "2", "3"]
    assert set(lines[2:]) == {f"generation {number} saved True note True" for number in (2, 3)}
    assert cli.report()["written"] == (["note"] if engine == "docker" else [])
    assert "error: " in cli("resume").stderr


@pytest.fixture
def failed(cli):
    """A job of local processes that has failed."""
    (cli.folder / "train.py").write_text(FAILS)
    run = ("run", "--engine", "process", "--trainers", "0", "--gpus", "none", "--max-restarts", "0")
    assert cli(*run, "train.py").returncode == 1
    return cli


def test_a_job_that_has_succeeded_must_not_be_resumed(failed):
    (failed.folder / "train.py").write_text("")
    assert failed("resume").returncode == 0
    done = failed("resume")
    assert done.returncode == 2
    assert f"error: {failed.run_dir().name} has succeeded\nhint: start a new job" in done.stderr


def test_a_job_that_another_process_has_resumed_meanwhile_must_not_be_resumed(failed):
    """For example, while the image was built."""
    (failed.folder / "train.py").write_text("")
    late = "from orchestrate.cli import main; from orchestrate.api import resume; import subprocess, sys; "
    late += "prepare = resume.check_script; command = [sys.executable, '-m', 'orchestrate', 'resume']; "
    late += "resume.check_script = lambda spec: (subprocess.run(command, check=True), prepare(spec)); "
    late += "sys.exit(main.main(['resume']))"
    done = subprocess.run(
        [sys.executable, "-c", late], cwd=failed.folder, env=failed.env, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr.splitlines()[-2:]) == (
        2,
        [
            f"error: {failed.run_dir().name} has succeeded",
            "hint: start a new job; its script can load the checkpoints of this one",
        ],
    )


def test_a_job_must_not_be_resumed_without_its_script_its_folder_or_its_record(failed):
    script, folder = failed.folder / "train.py", failed.folder
    text = script.read_text()
    script.unlink()
    assert "error: the script train.py does not exist" in failed("resume").stderr
    script.write_text(text)
    moved = folder.rename(folder.with_name("moved"))
    folder.mkdir()
    (moved / "runs").rename(folder / "runs")
    record = failed.run_dir()
    assert "error: the script train.py does not exist" in failed("resume", f"runs/{record.name}").stderr
    record.rename(record.with_name("other"))
    done = failed("resume", "runs/other")
    assert (done.returncode, "has no record" in done.stderr) == (2, True), done.stderr
    (folder / "runs").rename(moved / "runs")
    folder.rmdir()
    moved.rename(folder)


def test_a_resumed_job_must_go_on_if_its_orchestrator_is_killed_early(failed):
    """As if it were killed after it had reopened the job, and before it started anything."""
    paths = JobPaths(failed.run_dir())
    report = json.loads(paths.report.read_text())
    held = "from orchestrate.cli import main; from orchestrate.cli.commands import resume; import os, sys; "
    held += "resume.launch.supervise = lambda *_: os._exit(9); sys.exit(main.main(['resume']))"
    done = subprocess.run(
        [sys.executable, "-c", held], cwd=failed.folder, env=failed.env, capture_output=True, text=True
    )
    assert done.returncode == 9, done.stderr
    assert not paths.report.exists() and lock.holder(paths) is None
    done = failed("attach")
    assert done.returncode == 1
    again = json.loads(paths.report.read_text())
    assert (report["generations"], again["generations"]) == (1, 2)


@pytest.mark.docker
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can run nodes as another user")
def test_a_job_must_not_be_resumed_with_nodes_of_another_user(cli, docker_engine, nothing_left):
    (cli.folder / "train.py").write_text(FAILS)
    run = ("run", "--engine", "docker", "--trainers", "0", "--gpus", "none", "--max-restarts", "0", "train.py")
    assert cli(*run).returncode == 1
    done = cli("resume", SUDO_UID="12345", SUDO_GID="12345")
    assert done.returncode == 2
    assert "but its nodes would run as user 12345\nhint: resume it as it was started" in done.stderr
