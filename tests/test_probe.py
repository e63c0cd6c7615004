"""What is missing in an image must be reported before anything starts, and be looked for only once."""

import subprocess
import sys

import pytest
from conftest import docker, leftovers
from support.plans import Site

from orchestrate.engines import looked, process
from orchestrate.engines.docker import probe
from orchestrate.engines.docker.client import Daemon
from orchestrate.engines.process import ProcessEngine
from orchestrate.errors import ResourceError
from orchestrate.job.gpus import Gpu
from orchestrate.job.spec import IMAGE, JobSpec

CHANGES = {  # what is done to the project's image
    "elsewhere": "ENV PATH=/nowhere",
    "none": "USER root\nRUN rm -rf /opt/venv /usr/bin/python3* /usr/local/bin/python3*",
    "stuck": "USER root\nRUN rm -f /opt/venv/bin/python && "
    "printf '#!/bin/sh\\nsleep 1000\\n' > /opt/venv/bin/python && chmod +x /opt/venv/bin/python",
    "old": "USER root\nRUN rm -rf /opt/venv /usr/bin/python3* /usr/local/bin/python3* && "
    "printf '#!/bin/sh\\nprintf \"3 8\"\\n' > /usr/bin/python3 && chmod +x /usr/bin/python3",
}
TORCH = "import torch\nprint('cuda', torch.cuda.is_available())\n"

pytestmark = [pytest.mark.docker, pytest.mark.xdist_group("probe")]  # which share their images


@pytest.fixture(scope="module")
def images(docker_engine):
    """Images of which nodes have no `python` on PATH, no Python, or one that is too old."""
    names = {what: f"orchestrate-test-{what}" for what in CHANGES}
    for what, name in names.items():
        text = f"FROM {IMAGE}\n{CHANGES[what]}\n"
        subprocess.run(["docker", "build", "--quiet", "--tag", name, "-"], input=text, text=True, check=True)
    yield names
    docker("image", "rm", "--force", *names.values())


def run(cli, *words: str):
    return cli("run", "--engine", "docker", "--trainers", "1", *words)


def test_an_image_whose_python_is_not_on_its_path_must_run_a_job(cli, images, nothing_left):
    (cli.folder / "hello.py").write_text("import sys\nprint('hello of', sys.executable)\n")
    done = run(cli, "--image", images["elsewhere"], "--gpus", "none", "--", "hello.py")
    assert done.returncode == 0, done.stderr
    assert cli.log(1).startswith("hello of /")


@pytest.mark.parametrize(("what", "why"), [("none", "none found"), ("old", "python3 is Python 3.8")])
def test_an_image_without_a_python_for_nodes_must_be_refused_before_anything_starts(
    cli, images, nothing_left, what, why
):
    (cli.folder / "hello.py").write_text("print('hello')\n")
    done = run(cli, "--image", images[what], "--gpus", "none", "--", "hello.py")
    assert done.returncode == 4
    said = f"error: the image {images[what]} has no Python 3.9 or later: {why}"
    assert done.stderr.splitlines()[-2] == said and "tried python, python3" in done.stderr
    assert not [*cli.folder.glob("runs/*")]


def test_an_image_whose_python_hangs_must_not_hold_up_the_user_for_long(images, monkeypatch, tmp_path):
    monkeypatch.setattr(probe, "PYTHON_TIMEOUT", 1)
    with pytest.raises(ResourceError, match="timed out"):
        probe.python(Daemon(), images["stuck"], tmp_path)


def test_gpus_that_torch_cannot_use_must_not_be_trained_on_in_name_alone(cli, nvidia_runtime, nothing_left):
    (cli.folder / "uses.py").write_text(TORCH)
    done = run(cli, "--gpus", "all", "--", "uses.py")
    assert done.returncode == 4
    assert f"--gpus all: {IMAGE} cannot use the GPUs: torch " in done.stderr and "no NVIDIA driver" in done.stderr
    done = run(cli, "--", "uses.py")
    assert done.returncode == 0 and cli.log(0) == "cuda False\n"
    assert f"gloo on CPU ({IMAGE} cannot use the GPUs: torch" in done.stderr


def test_what_is_known_of_an_image_must_not_be_found_out_again(images, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    tmp_path.chmod(0o700)
    daemon, began = Daemon(), []
    look = probe._run
    monkeypatch.setattr(probe, "_run", lambda *words, **more: (began.append(words[3][0]), look(*words, **more))[1])
    for _ in range(2):
        assert probe.python(daemon, images["elsewhere"], tmp_path) == "/opt/venv/bin/python"
    assert began == ["python", "python3", "/opt/conda/bin/python", "/opt/venv/bin/python"]
    for _ in range(2):  # a new driver may have fixed it
        with pytest.raises(ResourceError):
            probe.python(daemon, images["none"], tmp_path)
    assert began[4:] == [*probe.PYTHONS] * 2
    assert leftovers(tmp_path) == {}


def test_the_projects_own_image_must_not_be_looked_into(monkeypatch, tmp_path):
    monkeypatch.setattr(probe, "_run", None)
    assert probe.python(None, IMAGE, tmp_path) == "python"


def test_local_processes_must_not_be_given_gpus_that_their_torch_cannot_use(monkeypatch, tmp_path):
    monkeypatch.setattr(process, "look", lambda: (Gpu(id="GPU-1", index=0),))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "uses.py").write_text(TORCH)
    found = Site(*ProcessEngine().inventory(JobSpec(command=("uses.py",)), tmp_path / "run", True))
    assert found.gpus == () and found.no_gpus.startswith(f"{sys.executable} cannot use the GPUs: torch ")
    (tmp_path / "uses.py").write_text("print('no torch')\n")
    found = Site(*ProcessEngine().inventory(JobSpec(command=("uses.py",)), tmp_path / "run", True))
    assert found.gpus == ("GPU-1",)


def test_torch_that_works_must_be_noted_and_one_that_does_not_be_asked_again(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    tmp_path.chmod(0o700)
    assert looked.cuda(["a"], "torch 2: no") == "torch 2: no" and not looked.known(["a"])
    assert looked.cuda(["a"], "") == "torch exited without output"
    assert looked.cuda(["a"], "works") == "" and looked.known(["a"]) == "works" and not looked.known(["b"])
