"""Jobs with object stores: checkpoints survive the machine, and output is copied at the end."""

import re
import shutil
import subprocess
import sys

import pytest
from support.faults import Background

URL = "s3://bucket/digits"


def test_a_job_that_runs_must_not_end_because_whoever_attaches_cannot_use_the_store(cli, nothing_left, tmp_path):
    folder = tmp_path / "copies"
    job = Background(cli, "process", "--checkpoints", folder.as_uri(), "count.py", "until-asked", "0.1", trainers=0)
    job.until_step(5)
    job.process.kill()
    job.end()
    shutil.rmtree(folder)
    folder.write_text("not a folder")
    done = cli("attach")
    assert done.returncode == 3 and f"error: {folder.as_uri()}" in done.stderr
    assert not job.events("job_ended")
    folder.unlink()
    cli.finish_jobs()
    done = cli("attach")
    assert done.returncode == 0, done.stderr


def test_a_job_that_was_killed_after_it_had_fetched_checkpoints_must_go_on(cli, nothing_left, tmp_path):
    url = (tmp_path / "copies").as_uri()
    run = ("run", "--engine", "process", "--trainers", "0", "--gpus", "none", "--checkpoints", url, "count.py")
    assert cli(*run, "10").returncode == 0
    assert cli("rm", "latest").returncode == 0
    killed = "import os, sys; from orchestrate.cli.main import main; from orchestrate.supervise.nodes import Nodes; "
    killed += f"Nodes.bring_up = lambda *_, **__: os._exit(9); sys.exit(main({[*run, '20']!r}))"
    done = subprocess.run([sys.executable, "-c", killed], cwd=cli.folder, env=cli.env, capture_output=True, text=True)
    assert done.returncode == 9, done.stderr
    done = cli("attach", "latest")
    assert done.returncode == 0, done.stderr
    steps = re.findall(r"step (\d+) in 0", cli.log(0))
    assert steps == [str(number) for number in range(11, 21)]


def test_a_job_must_end_even_if_its_output_cannot_be_copied_anywhere(cli, nothing_left, tmp_path):
    folder = tmp_path / "output"
    script = f"import pathlib; folder = pathlib.Path({str(folder)!r}); folder.rmdir(); folder.write_text('')"
    (cli.folder / "train.py").write_text(script)
    options = ("--engine", "process", "--trainers", "0", "--gpus", "none", "--output", folder.as_uri())
    done = cli("run", *options, "train.py")
    assert done.returncode == 0, done.stderr
    (copy,) = cli.report()["copies"]
    assert (copy["what"], copy["files"]) == ("output", 0) and copy["error"]


@pytest.mark.parametrize("key", ["checkpoints", "output"])
@pytest.mark.parametrize("url", ["s3://key:secret-part@bucket/x", "s3://bucket/../x", "s3://", "file://host/x"])
def test_a_url_that_cannot_be_used_must_be_refused(cli, key, url):
    done = cli("run", "--engine", "process", f"--{key}", url, "count.py", "5")
    assert (done.returncode, "secret-part" in done.stderr) == (2, False), done.stderr
    assert "URL" in done.stderr and not list(cli.folder.glob("runs/*"))


def test_a_missing_library_must_be_named(cli):
    blocked = "import sys; sys.modules['obstore.exceptions'] = None; from orchestrate.cli.main import main; "
    blocked += "sys.exit(main(['run', '--engine', 'process', '--output', 's3://bucket/x', 'count.py']))"
    done = subprocess.run([sys.executable, "-c", blocked], cwd=cli.folder, env=cli.env, capture_output=True, text=True)
    assert (done.returncode, "needs the package obstore" in done.stderr) == (4, True), done.stderr


@pytest.mark.parametrize("target", ["kubernetes", "slurm", "pbs", "compose"])
def test_object_stores_must_not_be_exported(cli, target):
    done = cli("export", target, "--gpus", "none", "--checkpoints", URL, "probe.py")
    assert (done.returncode, "need orchestrate while the job runs" in done.stderr) == (2, True)


def test_a_job_that_has_saved_nothing_must_be_told_so(cli, tmp_path):
    (cli.folder / "train.py").write_text("open('model.pt', 'w').close()\n")
    run = ("run", "--engine", "process", "--trainers", "0", "--gpus", "none", "train.py")
    done = cli(*run[:-1], "--checkpoints", f"file://{tmp_path}/store", *run[-1:])
    assert done.returncode == 0, done.stderr
    where = f"file://{tmp_path}/store"
    assert f"warning: checkpoints not copied completely to {where}: the script has saved none\n" in done.stderr
    assert "hint: let the script save its checkpoints to $JOB_DIR/checkpoints\n" in done.stderr
