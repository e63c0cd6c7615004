"""Local processes must run without Docker's SDK, and commands that need it must report that it is missing."""

import sys

import pytest
from support.repo import ROOT

HINT = f"install it ({sys.executable} -m pip install docker)"


@pytest.fixture
def bare(cli, tmp_path):
    """The command line in an environment without the package."""
    (tmp_path / "without").mkdir()
    (tmp_path / "without" / "docker.py").write_text("raise ModuleNotFoundError('no docker', name='docker')\n")
    cli.env["PYTHONPATH"] = f"{tmp_path / 'without'}:{ROOT}"
    return cli


def test_local_processes_must_run_without_the_sdk_and_all_commands_must_find_their_jobs(bare, nothing_left):
    done = bare("run", "--gpus", "none", "--trainers", "1", "--", "probe.py")
    assert done.returncode == 0
    assert done.stderr.splitlines()[0] == (
        "the Python package docker is missing; running as local processes, without isolation. "
        f"I{HINT[1:]} to use containers, or set --engine process."
    )
    name = bare.run_dir().name
    for arguments in (
        ["ps"],
        ["logs"],
        ["wait"],
        ["attach"],
        ["stop", name],
        ["doctor", "--engine", "process"],
        ["rm", name],
        ["export", "slurm", "probe.py"],
    ):
        done = bare(*arguments)
        assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "--engine", "docker", "probe.py"],
        ["plan", "--engine", "swarm", "probe.py"],
        ["doctor"],
        ["export", "kubernetes"],
    ],
)
def test_commands_that_need_the_sdk_must_report_that_it_is_missing(bare, arguments):
    done = bare(*arguments)
    assert (done.returncode, done.stdout) == (4, "")
    assert done.stderr == f"error: the Python package docker is missing\nhint: {HINT}\n"
