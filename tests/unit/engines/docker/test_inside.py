"""What starts a command beside a worker in a container."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.plans import HERE, plan

from orchestrate.engines.docker import labels, objects
from orchestrate.engines.docker.engine import DockerEngine
from orchestrate.spec.spec import JobSpec

NAMES = {"SSH_KEY": "one\ntwo", "DOCKER_AUTH": "three\nfour", "GIT_KEY": "five\nsix", "TOKEN": "seven"}


@pytest.mark.parametrize("name", NAMES)
def test_values_must_not_be_arguments_and_reach_the_command_under_their_names(monkeypatch, tmp_path, name):
    spec = JobSpec(env=NAMES, trainers=0)
    made = plan(spec, HERE, "a-1", 0)
    node = SimpleNamespace(status="running", id="container")
    monkeypatch.setattr(objects, "nodes_of", lambda *_: [node])
    monkeypatch.setattr(labels, "node", lambda _: "master")
    engine = DockerEngine.__new__(DockerEngine)
    engine.daemon = SimpleNamespace(host="unix:///run/docker.sock")  # type: ignore[assignment]
    local = engine.inside(spec, made, tmp_path, made.workers[0], terminal=False)
    for value in NAMES.values():
        assert not any(value in word for word in local.words)
    (file,) = local.files
    with file:
        file.seek(0)
        of_file = dict(line.partition("=")[::2] for line in file.read().decode().splitlines())
    of_options = [word.removeprefix("--env=") for word in local.words if word.startswith("--env=")]
    inside = of_file | {each: local.env[each] for each in of_options}
    assert not {"SSH_KEY", "DOCKER_AUTH"} & {*of_options}  # the docker command would use them
    words = local.words[local.words.index("container") + 1 :]
    words = [sys.executable if each == made.placement.python else each for each in words]
    shows = [sys.executable, "-c", "import json, os; print(json.dumps(dict(os.environ)))"]
    done = subprocess.run([*words, *shows], env=inside, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)[name] == NAMES[name]
    missing = subprocess.run([*words, str(Path(tmp_path, "none"))], env=inside, capture_output=True, text=True)
    assert (missing.returncode, missing.stderr) == (127, f"{tmp_path}/none: No such file or directory\n")
