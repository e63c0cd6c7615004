"""Many nodes that do nothing: time from the command to its exit, and what the orchestrator costs."""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import docker

from benchmarks.starts import PLAIN, ROOT, plain_image

NUMBERS = (1, 8, 32, 64)


def floor(nodes: int) -> float:
    """Raw calls to the engine's API, as many at once as we make: a network, the containers, and all away again."""
    client = docker.DockerClient(max_pool_size=32)
    began = time.monotonic()
    network = client.networks.create(f"floor-{os.getpid()}")

    def start(_: int) -> Any:
        command = ["python", "-c", "import signal; signal.pause()"]
        return client.containers.run(PLAIN, command, detach=True, network=network.name, init=True)

    with ThreadPoolExecutor(16) as pool:
        containers = list(pool.map(start, range(nodes)))
        list(pool.map(lambda container: container.remove(force=True), containers))
    network.remove()
    return time.monotonic() - began


def ours(nodes: int) -> tuple[float, float, float]:
    """Seconds, MB of memory at most and seconds of CPU of the orchestrator itself."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "orchestrate", "run", "--gpus", "none", "--trainers", str(nodes - 1)]
        began = time.monotonic()
        process = subprocess.Popen(
            [*command, "--runs", folder, "--", "benchmarks/nothing.py"], cwd=ROOT, stdout=-3, stderr=-3
        )
        _, status, usage = os.wait4(process.pid, 0)
        took = time.monotonic() - began
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return took, usage.ru_maxrss / 1024, usage.ru_utime + usage.ru_stime


def measure(runs: int) -> dict[str, Any]:
    """Interleaved, for each number of nodes."""
    plain_image()
    values: dict[str, tuple[list[float], str]] = {}
    ratios = {}
    for nodes in NUMBERS:
        raw, found = [], []
        for _ in range(runs):
            raw.append(floor(nodes))
            found.append(ours(nodes))
        seconds, memory, cpu = zip(*found)
        values[f"{nodes} nodes: raw calls (the floor)"] = (raw, "s")
        values[f"{nodes} nodes: orchestrate"] = (list(seconds), "s")
        values[f"{nodes} nodes: its memory"] = (list(memory), "MB")
        values[f"{nodes} nodes: its CPU time"] = (list(cpu), "s")
        ratios[f"{nodes} nodes, to the floor (≤ 1.15)"] = statistics.median(seconds) / statistics.median(raw)
    memory, _ = values[f"{NUMBERS[-1]} nodes: its memory"]
    ratios[f"its memory at {NUMBERS[-1]} nodes, in MB (≤ 80)"] = statistics.median(memory)
    return {"values": values, "ratios": ratios}
