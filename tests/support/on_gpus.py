"""Fixtures for tests on GPUs: this machine's GPUs, the processes that use them, and nodes with GPUs that stay up."""

import functools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import pytest

from orchestrate.engines import check_cache
from orchestrate.host.gpus import Gpu, look, offer, read, why_none
from orchestrate.spec.spec import IMAGE
from support.cli import Cli
from support.faults import Background, node_pid
from support.leftovers import DOCKER_REQUIRED
from support.processes import descendants
from support.warm_cluster import Ready, of_each_engine

GPU_REQUIRED = os.environ.get("ORCHESTRATE_REQUIRE_GPU") == "1"
GRACE = ("--set", "grace=5s")
SHARED = ("--set", "share_gpus=true")
ALONE = ("--trainers", "0", "--gpus", "1")  # one worker
NEARLY = 256 << 20  # bytes by which the memory in use may differ before and after a job
# How containers get GPUs: by NVIDIA's runtime, or as CDI devices.
WAYS = (
    ("--runtime", "nvidia", "--env", "NVIDIA_VISIBLE_DEVICES=all", "--env", "NVIDIA_DRIVER_CAPABILITIES=utility"),
    ("--device", "nvidia.com/gpu=all"),
)


@functools.cache
def unusable() -> str:
    """Why tests cannot use GPUs on this machine; empty if they can."""
    if not look():
        return why_none()
    done = subprocess.run([sys.executable, "-c", check_cache.CUDA], capture_output=True, text=True)
    if done.stdout.endswith("works"):
        return ""
    return f"torch in {sys.executable} cannot use the GPUs: {done.stdout or done.stderr[-300:]}"


@functools.cache
def uncontained() -> str:
    """Why containers cannot use this machine's GPUs, as with a stand-in for NVIDIA's runtime; empty if they can."""
    for way in WAYS:
        command = ["docker", "run", "--rm", "--pull", "never", *way, "--entrypoint", "nvidia-smi", IMAGE, "-L"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == 0 and {gpu.id for gpu in read(done.stdout, "")} == {gpu.id for gpu in look()}:
            return ""
    return f"containers cannot use the GPUs: {(done.stderr or done.stdout).strip()[-300:]}"


@pytest.fixture(scope="session")
def gpus() -> tuple[Gpu, ...]:
    """The GPUs that jobs can use."""
    if why := unusable():
        pytest.fail(f"ORCHESTRATE_REQUIRE_GPU=1, and {why}") if GPU_REQUIRED else pytest.skip(why)
    return offer(look(), "all").gpus


@pytest.fixture(params=["process", pytest.param("docker", marks=pytest.mark.docker)])
def gpu_engine(request, gpus, nothing_left):
    """Each engine that can use the GPUs in turn; the test must leave nothing behind."""
    if request.param == "docker":
        request.getfixturevalue("docker_engine")
        if why := uncontained():
            pytest.fail(why) if GPU_REQUIRED and DOCKER_REQUIRED else pytest.skip(why)
    return request.param


def tolerant(cli: Cli) -> Cli:
    """The same command line without warnings as errors, since torch warns about features of GPUs."""
    cli.env["PYTHONWARNINGS"] = "default"
    return cli


@pytest.fixture
def gpu_cli(cli, gpu_engine):
    """The command line for an engine that can use the GPUs."""
    return tolerant(cli)


class GpuNodes(Ready):
    """Two nodes that see all GPUs, and the folder whose jobs use them.

    `pair` are the options for two workers on two nodes, each with its own GPU, and thus NCCL, if there are two.
    """

    def __init__(self, folder: Path, engine: str, gpus: tuple[Gpu, ...]) -> None:
        super().__init__(folder, engine)
        tolerant(self)
        self.env["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
        self.gpus = gpus
        self.options = ("--trainers", "1", "--gpus", "all", *SHARED, *GRACE)
        self.pair = ("--trainers", "1", "--gpus", "2") if len(gpus) > 1 else ("--trainers", "1", "--gpus", "1", *SHARED)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a job, whose run directory becomes the only one."""
        for run in self.folder.glob("runs/*"):
            if run.name != self.cluster:
                shutil.rmtree(run)
        return self("run", "--engine", self.engine, *GRACE, *arguments)

    def start_job(self, *arguments: str) -> Background:
        """Start a job in the background."""
        return OnGpus(self, *arguments)

    def used(self) -> int:
        """Memory in use on the GPUs, in bytes."""
        return sum(gpu.used for gpu in look() if gpu.id in {one.id for one in self.gpus})

    def processes(self) -> list[int]:
        """The processes of the nodes, and their descendants."""
        if self.engine == "docker":
            nodes = [node_pid("docker", self.cluster, name) for name in ("master", "trainer-1")]
        else:
            nodes = [int(pid) for pid in re.findall(r"process (\d+) ", self("down", "--dry-run", self.cluster).stdout)]
        return [*nodes, *descendants(*nodes)]

    def only_nodes(self) -> bool:
        """Whether only two nodes and their zygotes exist; a zombie counts as a process."""
        return len(self.processes()) == 4


class OnGpus(Background):
    """`orchestrate run` on GPUs, in the background."""

    def __init__(self, nodes: GpuNodes, *arguments: str) -> None:
        self.cli, self.engine = nodes, nodes.engine
        self.process = nodes.start("run", "--engine", nodes.engine, *GRACE, *arguments)
        self.out, self.err = "", ""


@pytest.fixture(scope="session")
def gpu_clusters(tmp_path_factory, gpus):
    """Nodes of each engine that stay up, created on first use."""
    yield from of_each_engine(lambda engine: GpuNodes(tmp_path_factory.mktemp(f"gpus-{engine}"), engine, gpus))


@pytest.fixture
def gpu_nodes(gpu_engine, gpu_clusters):
    """The command line in a folder whose nodes with GPUs are already up and warm."""
    nodes = gpu_clusters(gpu_engine)
    nodes.up()
    yield nodes
    nodes.settle()


def on_cuda(pids: Iterable[int]) -> set[int]:
    """The processes that have initialized CUDA, as far as this user can see: only root sees zygotes.

    CUDA opens the device for unified memory; detecting GPUs, as nvidia-smi does, opens only the others.
    """
    found = set()
    for pid in pids:
        with suppress(OSError):
            for path in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):  # it has just been closed
                    if "/dev/nvidia-uvm" in os.readlink(path):
                        found.add(pid)
    return found
