"""Images that are missing something, on a real engine."""

import os
import subprocess

import pytest
from support.leftovers import docker, leftovers

from orchestrate.engines.docker import probe
from orchestrate.engines.docker.client import Daemon
from orchestrate.errors import ResourceError
from orchestrate.spec.spec import IMAGE

CHANGES = {  # changes to the project's image
    "elsewhere": "ENV PATH=/nowhere",
    "none": "USER root\nRUN rm -rf /opt/venv/bin /usr/bin/python3* /usr/local/bin/python3*",
    "stuck": "USER root\nRUN rm -f /opt/venv/bin/python && "
    "printf '#!/bin/sh\\nsleep 1000\\n' > /opt/venv/bin/python && chmod +x /opt/venv/bin/python",
    "old": "USER root\nRUN rm -rf /opt/venv/bin /usr/bin/python3* /usr/local/bin/python3* && "
    "printf '#!/bin/sh\\nprintf \"3 8\"\\n' > /usr/bin/python3 && chmod +x /usr/bin/python3",
}
TORCH = "import torch\nprint('cuda', torch.cuda.is_available())\n"
pytestmark = [pytest.mark.docker, pytest.mark.xdist_group("probe")]  # these tests share their images


@pytest.fixture(scope="module")
def images(docker_engine):
    """Images with no `python` on PATH, with no Python, or with one that hangs or is too old."""
    names = {what: f"orchestrate-test-{os.getpid()}-{what}" for what in CHANGES}
    for what, name in names.items():
        text = f"FROM {IMAGE}\n{CHANGES[what]}\n"
        subprocess.run(["docker", "build", "--quiet", "--tag", name, "-"], input=text, text=True, check=True)
    yield names
    docker("image", "rm", "--force", *names.values())


def run(cli, *arguments: str):
    return cli("run", "--engine", "docker", "--trainers", "1", *arguments)


def test_an_image_whose_python_is_not_on_path_must_run_a_job(cli, images, nothing_left):
    (cli.folder / "hello.py").write_text("import sys\nprint('hello of', sys.executable)\n")
    done = run(cli, "--image", images["elsewhere"], "--gpus", "none", "--", "hello.py")
    assert done.returncode == 0, done.stderr
    assert cli.log(1).startswith("hello of /")


@pytest.mark.parametrize(("what", "why"), [("none", "none found"), ("old", "python3 is Python 3.8")])
def test_an_image_without_a_suitable_python_must_be_refused_before_anything_starts(
    cli, images, nothing_left, what, why
):
    (cli.folder / "hello.py").write_text("print('hello')\n")
    done = run(cli, "--image", images[what], "--gpus", "none", "--", "hello.py")
    assert done.returncode == 4
    message = f"error: the image {images[what]} has no Python 3.9 or later: {why}"
    assert done.stderr.splitlines()[-2] == message and "tried python, python3" in done.stderr
    assert not [*cli.folder.glob("runs/*")]


def test_an_image_whose_python_hangs_must_be_refused_after_a_time_limit(images, monkeypatch, tmp_path):
    monkeypatch.setattr(probe, "PYTHON_TIMEOUT", 1)
    with pytest.raises(ResourceError, match="timed out"):
        probe.python(Daemon(), images["stuck"], tmp_path)


def test_gpus_that_torch_cannot_use_must_not_be_assigned_to_a_job(cli, nvidia_runtime, nothing_left):
    (cli.folder / "uses.py").write_text(TORCH)
    done = run(cli, "--gpus", "all", "--", "uses.py")
    assert done.returncode == 4
    assert f"--gpus all: {IMAGE} cannot use the GPUs: torch " in done.stderr and "no NVIDIA driver" in done.stderr
    done = run(cli, "--trainers", "0", "--", "uses.py")
    assert done.returncode == 0 and cli.log(0) == "cuda False\n"
    assert f"gloo on CPU ({IMAGE} cannot use the GPUs: torch" in done.stderr


def test_only_a_successful_probe_of_an_image_must_be_cached(images, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    tmp_path.chmod(0o700)
    daemon, probed = Daemon(), []
    run_probe = probe._run
    monkeypatch.setattr(
        probe, "_run", lambda *arguments, **more: (probed.append(arguments[3][0]), run_probe(*arguments, **more))[1]
    )
    for _ in range(2):
        assert probe.python(daemon, images["elsewhere"], tmp_path) == "/opt/venv/bin/python"
    assert probed == ["python", "python3", "/opt/conda/bin/python", "/opt/venv/bin/python"]
    for _ in range(2):  # a new driver may have fixed it
        with pytest.raises(ResourceError):
            probe.python(daemon, images["none"], tmp_path)
    assert probed[4:] == [*probe.PYTHONS] * 2
    assert leftovers(tmp_path) == {}
