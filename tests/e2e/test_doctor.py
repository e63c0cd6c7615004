"""`doctor` with its job of two nodes, on a real engine."""

import json

import pytest


@pytest.mark.each_engine
def test_doctor_must_run_a_job_of_two_nodes(cli, engine):
    done = cli("doctor", "--engine", engine, "--gpus", "none", "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 0 and not [one for one in found if one["state"] == "error"], found
    assert any(one["what"].startswith("a job of two nodes ran ten steps in") for one in found)
    assert not (cli.folder / "runs").exists()


def test_a_job_that_fails_must_be_reported_with_its_cause_and_hint(cli, nothing_left):
    """The job has a module of the user's folder in its way."""
    (cli.folder / "torch.py").write_text("raise ImportError('a file of the user')\n")
    done = cli("doctor", "--engine", "process", PYTHONPATH=f"{cli.folder}:{cli.env['PYTHONPATH']}")
    assert done.returncode == 1, done.stdout
    error = next(line for line in done.stdout.splitlines() if line.startswith("error"))
    assert error.startswith("error    a job of two nodes failed: rank ")


def test_a_job_that_cannot_start_must_be_reported_with_the_hint(cli, nothing_left):
    done = cli("doctor", "--engine", "process", "--memory", "4g")
    lines = done.stdout.splitlines()
    error = "error    a job of two nodes cannot start: the process engine does not support memory"
    assert done.returncode == 2 and lines[-2] == error and "--set optional=memory" in lines[-1]
    assert "two nodes" not in cli("doctor", "--engine", "process", "--memory", "4g", "--quick").stdout
