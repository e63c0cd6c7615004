"""Commands and environments must reach a container unchanged, on a real engine."""

import json
import os
import subprocess

import pytest
import yaml
from support.exports import make_folder
from support.odd_text import odd

from orchestrate.export import document
from orchestrate.export.compose import compose
from orchestrate.spec.layers import resolve

TEXTS = odd(300)
ENV = {f"ODD_{number}": text for number, text in enumerate(TEXTS)}
SPEC = {"command": ["train.py", *TEXTS], "env": ENV | {"y": "y", "NO": "no"}}


# --- on a real engine

FOLDER = 'a:b $HOME ${A:-b} it\'s "so" \\ \n\té😀 \x01:ro'


@pytest.mark.docker
@pytest.mark.parametrize(
    "name", [FOLDER, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("-a", " a "))]
)
def test_a_job_must_run_in_a_folder_with_any_name(cli, docker_engine, nothing_left, name):
    """Under the orchestrator, and with Compose alone."""
    cli.folder /= name
    cli.folder.mkdir()
    (cli.folder / "-here.py").write_text("import sys; print(sys.argv)\n")
    command = ["--gpus", "none", "--trainers", "0", "--set", "warm=false", "--", "./-here.py", "a b"]
    done = cli("run", "--engine", "docker", *command)
    assert done.returncode == 0, done.stderr
    assert "['./-here.py', 'a b']" in cli.log(0)
    job = cli.folder / "runs" / "here" / "job"
    file = cli.folder.parent / "job.yml"
    file.write_text(cli("export", "compose", *command).stdout)
    make_folder(file.read_text())
    compose = ["docker", "compose", "--project-name", f"here-{os.getpid()}", "--file", str(file)]
    try:
        done = subprocess.run([*compose, "up", "--scale", "trainer=0"], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    finally:
        subprocess.run([*compose, "down"], check=True, capture_output=True)
    assert "['./-here.py', 'a b']" in (job / "logs" / "rank-0.log").read_text()


PRINT = "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))"


@pytest.mark.docker
def test_compose_must_pass_text_to_a_container_unchanged(docker_engine, tmp_path, nothing_left, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = compose(resolve(SPEC, {"gpus": "none"}, {"env": {**ENV, "ODD_TOKEN": "canary"}}), "odd")
    make_folder(text)
    job = yaml.safe_load(text)
    master = job["services"]["master"] | {"entrypoint": ["python", "-c", PRINT], "depends_on": []}
    file = tmp_path / "job.yml"
    file.write_text(document(job | {"services": {"master": master}}))
    name = f"odd-{os.getpid()}"
    command = ["docker", "compose", "--project-name", name, "--file", str(file)]
    secret = '$HOME ${A:-b} $$ it\'s\n"so"'
    try:
        done = subprocess.run(
            [*command, "run", "--rm", "-T", "master"],
            env=os.environ | {"ODD_TOKEN": secret},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
    finally:
        subprocess.run([*command, "down"], env=os.environ | {"ODD_TOKEN": "x"}, check=True, capture_output=True)
    arguments, env = json.loads(done.stdout)
    assert arguments == SPEC["command"]
    assert {key: env[key] for key in ENV} == ENV and env["ODD_TOKEN"] == secret
    done = subprocess.run([*command, "config"], capture_output=True, text=True)
    assert done.returncode != 0 and "set ODD_TOKEN" in done.stderr
