"""Exports from the command line, and an exported Compose file on a real engine."""

import os
import subprocess

import pytest
import yaml
from support.exports import make_folder
from support.leftovers import docker
from support.waiting import eventually

from orchestrate.host import users
from orchestrate.spec.spec import JobSpec


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["kubernetes", "--gpus", "3", "--trainers", "1"], "3 GPUs cannot be divided evenly among 2 nodes"),
        (["slurm", "--form", "job"], "unknown form 'job'"),
        (["compose", "--form", "job"], "unknown form 'job'"),
        (["nomad"], "unknown target 'nomad'"),
        (["kubernetes", "--set", "network=host"], "pin, share_gpus, queue and network cannot be exported"),
        (["slurm", "--set", "user=root"], "user is root, but Slurm runs a job as the user who submits it"),
        (["slurm", "--set", "constraints=[node.labels.a == b]"], "constraints and encrypt are for Swarm only"),
    ],
)
def test_a_job_that_cannot_be_exported_must_be_refused_with_the_reason(cli, arguments, message):
    done = cli("export", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr


def test_flags_must_be_accepted_before_the_job_file(cli):
    (cli.folder / "job.yaml").write_text("name: mine\ncommand: count.py\n")
    done = cli("export", "kubernetes", "--form", "jobset", "--gpus", "none", "job.yaml")
    assert done.returncode == 0, done.stderr
    assert "kind: JobSet" in done.stdout and "name: mine" in done.stdout


def test_compose_must_not_interpolate_variables_of_a_command(cli):
    done = cli("export", "compose", "--gpus", "none", "--set", "env.A=$HOME", "--", "count.py", "${B}")
    assert done.returncode == 0, done.stderr
    master = yaml.safe_load(done.stdout)["services"]["master"]
    assert (master["command"][-1], master["environment"]["A"]) == ("$${B}", "$$HOME")


LIST_FILES = """\
import os, sys
print(os.listdir("runs"), os.listdir(".git"), repr(open(".env").read()), sys.argv[1])
"""
ARGUMENTS = ("--set", "expand=false", "--", "look.py", "$RANK")


@pytest.mark.docker
def test_a_job_of_the_compose_file_must_not_see_hidden_files(cli, docker_engine, nothing_left):
    (cli.folder / ".git").mkdir()
    for name in (".git/config", ".env"):
        (cli.folder / name).write_text("canary")
    (cli.folder / ".dockerignore").write_text(".env\n")
    (cli.folder / "look.py").write_text(LIST_FILES)
    file, log = cli.folder / "job.yml", cli.folder / "runs" / "look" / "job" / "logs" / "rank-0.log"
    file.write_text(cli("export", "compose", "--gpus", "none", "--trainers", "0", *ARGUMENTS).stdout)
    make_folder(file.read_text())
    compose = ["docker", "compose", "--file", str(file)]
    try:
        up = subprocess.run([*compose, "up", "--scale", "trainer=0"], capture_output=True, text=True, timeout=120)
        assert up.returncode == 0, up.stdout + up.stderr
    finally:
        subprocess.run([*compose, "down"], check=True, capture_output=True)
    assert "[] [] '' $RANK\n" in log.read_text()


@pytest.mark.docker
def test_the_compose_file_must_train(cli, docker_engine, nothing_left):
    file, job = cli.folder / "job.yml", cli.folder / "runs" / "steps" / "job"
    done = cli("export", "compose", "--gpus", "none", "--trainers", "2", "--", "steps.py", "0=0", "1=0", "2=0")
    file.write_text(done.stdout)
    make_folder(done.stdout)
    compose = ["docker", "compose", "--file", str(file)]
    try:
        up = subprocess.run([*compose, "up", "--scale", "trainer=2"], capture_output=True, text=True, timeout=120)
        assert up.returncode == 0, up.stdout + up.stderr
        assert eventually(lambda: len(list(job.glob("logs/*.log"))) == 3)
        owner = users.nodes_of(JobSpec().user) or (os.getuid(), os.getgid())
        assert {(path.stat().st_uid, path.stat().st_gid) for path in job.rglob("*")} == {owner}
    finally:
        subprocess.run([*compose, "down"], check=True, capture_output=True)
    assert not docker("ps", "-aq", "--filter", "label=com.docker.compose.project=steps")
