"""Log lines per second from four nodes to a reader; none may be lost, duplicated or out of order within a rank."""

import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from docker import DockerClient

from benchmarks.starts import NODES, ROOT, docker, plain_image
from benchmarks.starts import PLAIN as IMAGE

LINES = 250_000  # per node
SCRIPT = f"for i in range({LINES}): print('line', i)"


def check(name: str, numbers: Iterable[int]) -> None:
    """Raise SystemExit unless the numbers are complete and in order."""
    if not all(one == other for one, other in itertools.zip_longest(numbers, range(LINES))):
        raise SystemExit(f"{name}: lines are lost, duplicated or out of order")


def ours(folder: str) -> float:
    """Lines per second that `orchestrate logs` prints for a job that has ended."""
    (run,) = Path(folder).glob("*/logs")
    with tempfile.TemporaryFile() as out:
        started = time.monotonic()
        command = [sys.executable, "-m", "orchestrate", "logs", run.parent.name, "--runs", folder]
        subprocess.run(command, check=True, stdout=out, cwd=ROOT)
        took = time.monotonic() - started
        out.seek(0)
        lines = out.read().decode().splitlines()
    for rank in range(NODES):
        own = [line for line in lines if line.startswith(f"[{rank}] ")]
        check("orchestrate", (int(line.rsplit(maxsplit=1)[1]) for line in own))
    return NODES * LINES / took


def sdk(containers: list[Any]) -> float:
    """The same through docker-py's streams, with one thread per container."""
    started = time.monotonic()

    def read(container: Any) -> bytes:
        return b"".join(container.logs(stream=True, follow=True))

    with ThreadPoolExecutor(NODES) as pool:
        texts = list(pool.map(read, containers))
    took = time.monotonic() - started
    for text in texts:
        check("docker-py", (int(line.rsplit(maxsplit=1)[1]) for line in text.splitlines()))
    return NODES * LINES / took


def compose_logs(compose: list[str]) -> float:
    """The same with `docker compose logs`."""
    started = time.monotonic()
    text = docker(*compose, "logs", "--no-color")
    took = time.monotonic() - started
    found = re.findall(r"^node-(\d+) *\| line (\d+)$", text, re.MULTILINE)
    for node in range(1, NODES + 1):
        check("docker compose logs", (int(number) for name, number in found if int(name) == node))
    return NODES * LINES / took


def measure(runs: int) -> dict[str, Any]:
    """Read the same lines, written by containers of each kind, in every run."""
    plain_image()
    client = DockerClient(max_pool_size=8)
    rates: dict[str, list[float]] = {"docker-py": [], "docker compose logs": [], "orchestrate": []}
    os.sched_setaffinity(0, {0})  # inherited by child processes
    with tempfile.TemporaryDirectory() as folder:
        script = ROOT / "benchmarks" / "lines.py"
        command = [sys.executable, "-m", "orchestrate", "run", "--gpus", "none", "--trainers", str(NODES - 1)]
        subprocess.run(
            [*command, "--runs", folder, "--", str(script), str(LINES)], check=True, capture_output=True, cwd=ROOT
        )
        project, file = f"peer-{os.getpid()}", Path(folder, "compose.yml")
        service = {"image": IMAGE, "command": ["python", "-c", SCRIPT], "scale": NODES}
        file.write_text(json.dumps({"services": {"node": service}}))
        compose = ["compose", "--project-name", project, "--file", str(file)]
        try:
            docker(*compose, "up", "--detach")
            containers = client.containers.list(all=True, filters={"label": f"com.docker.compose.project={project}"})
            for container in containers:
                container.wait()
            for _ in range(runs):
                rates["docker-py"].append(sdk(containers))
                rates["docker compose logs"].append(compose_logs(compose))
                rates["orchestrate"].append(ours(folder))
        finally:
            docker(*compose, "down")
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    values = {name: (found, "/s") for name, found in rates.items()}
    *peers, own = (statistics.median(found) for found in rates.values())
    ratios = {"orchestrate ÷ best peer": own / max(peers)}
    ratios["lines per second (≥ 1000000)"] = own
    return {"values": values, "ratios": ratios}
