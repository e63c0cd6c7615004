"""Containers must get the GPUs of their job, by NVIDIA's runtime or as CDI devices, whichever the engine has."""

import re
import subprocess
import sys

import pytest
from support.leftovers import DOCKER_REQUIRED
from support.printed import printed

from orchestrate.engines.docker import toolkit
from orchestrate.engines.docker.client import Daemon

LISTS = """
import os, subprocess
lines = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout.splitlines()
print("sees", len(lines), "has", os.environ["CUDA_VISIBLE_DEVICES"].count("GPU-"))
"""


# The command line on a real engine with CDI devices, without its NVIDIA runtime.
WITHOUT_RUNTIME = """
import sys
from orchestrate.engines.docker import toolkit
from orchestrate.engines.docker.client import Daemon
made = Daemon.__init__
def init(self):
    made(self)
    self.info["Runtimes"].pop("nvidia", None)
Daemon.__init__, toolkit.CDI = init, sys.argv.pop(1)
from orchestrate.__main__ import run
run()
"""


@pytest.fixture
def on_cdi(docker_engine, cli):
    if not Daemon().info.get("CDISpecDirs"):
        why = "the engine has no CDI devices; .ci/docker-engine starts one with stand-ins"
        pytest.fail(why) if DOCKER_REQUIRED else pytest.skip(why)
    (cli.folder / "lists.py").write_text(LISTS)

    def command(kind: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        program = [sys.executable, "-c", WITHOUT_RUNTIME, kind, *arguments]
        return subprocess.run(program, cwd=cli.folder, env=cli.env, capture_output=True, text=True)

    return command


@pytest.mark.docker
def test_nodes_must_see_their_gpus_as_cdi_devices(on_cdi, nothing_left):
    done = on_cdi(toolkit.CDI, "run", "--engine", "docker", "--gpus", "2", "--trainers", "1", "--", "lists.py")
    assert done.returncode == 0 and "NCCL on GPU" in done.stderr, done.stderr
    assert [printed(done.stdout, rank) for rank in range(2)] == [["sees 2 has 1"]] * 2


@pytest.mark.docker
def test_a_job_without_the_cdi_device_must_train_on_the_cpu_and_say_why(on_cdi):
    done = on_cdi("nvidia.com/nonesuch", "plan", "--engine", "docker", "--trainers", "0", "--", "lists.py")
    (why,) = re.findall(r"gloo on CPU \((.*)\)$", done.stdout, re.M)
    assert why.startswith("containers cannot see any GPU: ") and "nvidia.com/nonesuch=all" in why
