"""Jobs must run without Docker's SDK, and commands that need it must report that it is missing."""

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
    assert bare("run", "--engine", "process", "--trainers", "1", "--", "probe.py").returncode == 0
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
        ["export", "kubernetes", "--image", "a.example/b:1", "probe.py"],
    ):
        done = bare(*arguments)
        assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr


@pytest.mark.docker
def test_containers_must_run_without_the_sdk(bare, docker_engine, nothing_left):
    assert bare("run", "--engine", "docker", "--gpus", "none", "--trainers", "1", "--", "probe.py").returncode == 0
    assert bare("doctor", "--engine", "docker", "--quick").returncode == 0


@pytest.mark.docker
@pytest.mark.parametrize(
    "arguments",
    [["plan", "--engine", "swarm", "probe.py"], ["run", "--engine", "docker", "--image", "a.example/b:1", "probe.py"]],
)
def test_commands_that_need_the_sdk_must_report_that_it_is_missing(bare, docker_engine, arguments):
    done = bare(*arguments)
    assert (done.returncode, done.stdout) == (4, "")
    assert done.stderr == f"error: the Python package docker is missing\nhint: {HINT}\n"
