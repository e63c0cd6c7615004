"""Ways to start four nodes for one all-reduce, each timed from the command to its exit, all with the same image."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from orchestrate.spec.spec import IMAGE

ROOT = Path(__file__).resolve().parents[1]
NODES = 4
SCRIPT = "examples/allreduce.py"
PLAIN = "orchestrate-benchmark:plain"  # the image without our entry point, as other tools expect
PEERS = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "orchestrate-benchmarks")


def docker(*arguments: str, **options: object) -> str:
    """Run a `docker` command; return its output."""
    done = subprocess.run(["docker", *arguments], check=True, capture_output=True, text=True, **options)  # type: ignore[call-overload]
    return str(done.stdout)


def plain_image() -> str:
    """Build the image for other tools; return its name."""
    link = "RUN ln -sf $(command -v torchrun) /usr/local/bin/"  # for login shells, which reset the image's PATH
    docker("build", "--tag", PLAIN, "-", input=f"FROM {IMAGE}\nENTRYPOINT []\nUSER root\n{link}\n")
    return PLAIN


def timed(start: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    started = time.monotonic()
    start()
    return time.monotonic() - started


def bare() -> None:
    """The baseline: a network, and four concurrent `docker run` with the right environment."""
    name = f"baseline-{os.getpid()}"
    docker("network", "create", name)
    mounts = ["--volume", f"{ROOT}:/workspace:ro", "--workdir", "/workspace"]
    common = ["--network", name, *mounts, "--env", f"WORLD_SIZE={NODES}", "--env", f"MASTER_ADDR={name}-0"]
    common += ["--env", "MASTER_PORT=29500", "--env", "OMP_NUM_THREADS=1", "--init", "--rm"]

    def run(rank: int) -> None:
        docker("run", "--name", f"{name}-{rank}", *common, "--env", f"RANK={rank}", PLAIN, "python", SCRIPT)

    try:
        with ThreadPoolExecutor(NODES) as pool:
            list(pool.map(run, range(NODES)))
    finally:
        docker("network", "rm", name)


def ours(*options: str) -> None:
    """`python -m orchestrate run`."""
    with tempfile.TemporaryDirectory() as runs:
        orchestrate("run", "--gpus", "none", "--trainers", str(NODES - 1), "--runs", runs, *options, "--", SCRIPT)


def orchestrate(*arguments: str, folder: Path = ROOT) -> str:
    """Run an `orchestrate` command in a folder; return its output."""
    command = [sys.executable, "-m", "orchestrate", *arguments]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd=folder, env=env).stdout


COMPOSE = f"""
services:
  node:
    image: {PLAIN}
    init: true
    working_dir: /workspace
    volumes: ["{ROOT}:/workspace:ro"]
    environment: {{OMP_NUM_THREADS: "1"}}
    command: >-
      torchrun --nnodes {NODES} --nproc-per-node 1 --rdzv-backend c10d --rdzv-id b
      --rdzv-endpoint PROJECT-node-1:29400 {SCRIPT}
"""


def torchrun_in_compose() -> None:
    """A handwritten Compose file, with torchrun in every container."""
    project = f"peer-{os.getpid()}"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "compose.yml")
        file.write_text(COMPOSE.replace("PROJECT", project))
        compose = ["compose", "--project-name", project, "--file", str(file)]
        try:
            docker(*compose, "up", "--scale", f"node={NODES}", "--abort-on-container-failure")
        finally:
            docker(*compose, "down", "--timeout", "1")


def environment(package: str) -> Path:
    """Install a peer in its own virtual environment at the first call; return the environment's `bin`."""
    folder = PEERS / package.partition("[")[0]
    if not (folder / "done").exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([folder / "bin" / "pip", "install", "--quiet", package], check=True, capture_output=True)
        (folder / "done").touch()
    return folder / "bin"


def torchx() -> None:
    """TorchX's scheduler `local_docker`."""
    command = [str(environment("torchx") / "torchx"), "run", "--scheduler", "local_docker", "--wait", "--workspace", ""]
    job = ["dist.ddp", "-j", f"{NODES}x1", "--image", PLAIN, "--cpu", "1", "--memMB", "2048", "--env"]
    job += ["OMP_NUM_THREADS=1", "--mounts", f"type=bind,src={ROOT},dst=/workspace,readonly", "--script", SCRIPT]
    try:
        subprocess.run([*command, *job], check=True, capture_output=True, cwd="/")
    finally:  # TorchX does not remove its containers and network
        left = docker("ps", "--all", "--quiet", "--filter", "label=torchx.pytorch.org/app-id").split()
        if left:
            docker("rm", "--force", *left)
            docker("network", "rm", "torchx")


def kubeflow() -> None:
    """The container backend of Kubeflow's SDK."""
    python = environment("kubeflow[docker]") / "python"
    subprocess.run(
        [python, ROOT / "benchmarks" / "kubeflow_job.py", PLAIN, str(NODES)], check=True, capture_output=True, cwd="/"
    )


PEER_STARTS: dict[str, Callable[[], None]] = {
    "Compose with torchrun": torchrun_in_compose,
    "TorchX, local_docker": torchx,
    "Kubeflow SDK, container backend": kubeflow,
}

BASELINE, OURS = "bare docker run (baseline)", "orchestrate"


def interleaved(ways: dict[str, Callable[[], None]], runs: int) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Run each way in turn, `runs` times; return the seconds of each, and the reason for each that failed."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    failed: dict[str, str] = {}
    for _ in range(runs):
        for name, way in ways.items():
            if name in failed:
                continue
            try:
                seconds[name].append(timed(way))
            except (subprocess.CalledProcessError, OSError) as error:
                text = getattr(error, "stderr", None) or str(error)
                lines = (text.decode(errors="replace") if isinstance(text, bytes) else text).strip().splitlines()
                failed[name] = lines[-1][:200] if lines else str(error)
    return {name: found for name, found in seconds.items() if found}, failed


def ratio(seconds: dict[str, list[float]], name: str, others: list[str]) -> float:
    """The median of one way divided by the smallest median of the others."""
    return statistics.median(seconds[name]) / min(statistics.median(seconds[other]) for other in others)
