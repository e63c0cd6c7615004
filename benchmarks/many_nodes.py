"""Many idle nodes: time to start and remove them, calls to the engine, and the cost of the orchestrator."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import docker

from benchmarks import starts
from benchmarks.proxy import Proxy
from benchmarks.starts import PLAIN, ROOT, plain_image

NUMBERS = (1, 8, 32, 64)
SLEEP = 10.0  # seconds
SLEEPER = ["python", "-c", "import signal; signal.pause()"]


class Counting(Proxy):
    """Counts requests to the engine."""

    calls = 0

    def passes(self, chunk: bytes, asks: bool, connection: dict[str, Any]) -> bytes:
        """Pass everything on."""
        self.calls += chunk.count(b" HTTP/1.1\r\n") if asks else 0
        return chunk


def baseline(nodes: int) -> tuple[float, float]:
    """Seconds up and down with raw calls to the engine's API, with the same concurrency as orchestrate."""
    client = docker.DockerClient(max_pool_size=32)
    name = f"baseline-{os.getpid()}"
    started = time.monotonic()
    network = client.networks.create(name)

    def start(_: int) -> Any:
        return client.containers.run(PLAIN, SLEEPER, detach=True, network=name, init=True)

    with ThreadPoolExecutor(16) as pool:
        containers = list(pool.map(start, range(nodes)))
        up = time.monotonic()
        list(pool.map(lambda container: container.remove(force=True), containers))
    network.remove()
    return up - started, time.monotonic() - up


def compose(nodes: int) -> tuple[float, float]:
    """Seconds up and down with Compose."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "compose.yml")
        file.write_text(json.dumps({"services": {"node": {"image": PLAIN, "init": True, "command": SLEEPER}}}))
        command = ["compose", "--project-name", f"peer-{os.getpid()}", "--file", str(file)]
        started = time.monotonic()
        starts.docker(*command, "up", "--detach", "--scale", f"node={nodes}")
        up = time.monotonic()
        starts.docker(*command, "down", "--timeout", "0")
        return up - started, time.monotonic() - up


def ours(nodes: int) -> dict[str, float]:
    """Seconds up and down, calls to the engine, and the orchestrator's peak memory (MB) and CPU use (% of a core)."""
    with tempfile.TemporaryDirectory() as folder:
        proxy = Counting(Path(folder, "engine.sock"))
        env = os.environ | {"DOCKER_HOST": f"unix://{proxy.path}"}
        command = [sys.executable, "-m", "orchestrate", "run", "--gpus", "none", "--trainers", str(nodes - 1)]
        script = ["--set", "grace=3s", "--runs", f"{folder}/runs", "--", "benchmarks/nothing.py", str(SLEEP)]
        process = subprocess.Popen(
            [*command, *script], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env
        )
        while "generation_started" not in _events(folder):
            time.sleep(0.05)
        time.sleep(1.0)  # excludes work at the start
        before, started = _cpu(process.pid), time.monotonic()
        time.sleep(SLEEP - 3)
        share = (_cpu(process.pid) - before) / (time.monotonic() - started)
        memory = _memory(process.pid)
        if process.wait():
            raise subprocess.CalledProcessError(process.returncode, command)
        events = _events(folder)
        return {
            "up": events["generation_started"] - events["nodes_starting"],
            "down": events["nodes_down"] - events["nodes_stopping"],
            "calls": float(proxy.calls),
            "memory": memory,
            "share": 100 * share,
        }


def _events(folder: str) -> dict[str, float]:
    """The time of each event, in seconds since the start of the job."""
    lines = [line for path in Path(folder).glob("runs/*/events.jsonl") for line in path.read_text().splitlines()]
    return {event["event"]: event["seconds"] for event in map(json.loads, lines)}


def _memory(pid: int) -> float:
    """Peak memory of a process in MB."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.partition("VmHWM:")[2].split()[0]) / 1024


def _cpu(pid: int) -> float:
    """CPU seconds used by a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(runs: int) -> dict[str, Any]:
    """Interleave the ways, for each number of nodes."""
    plain_image()
    values: dict[str, tuple[list[float], str]] = {}
    ratios = {}
    for nodes in NUMBERS:
        raw, peer, found = [], [], []
        for _ in range(runs):
            raw.append(baseline(nodes))
            peer.append(compose(nodes))
            found.append(ours(nodes))
        for i, direction in enumerate(("up", "down")):
            values[f"{nodes} nodes {direction}: raw API calls (baseline)"] = [one[i] for one in raw], "s"
            values[f"{nodes} nodes {direction}: Compose"] = [one[i] for one in peer], "s"
            values[f"{nodes} nodes {direction}: orchestrate"] = [one[direction] for one in found], "s"
        values[f"{nodes} nodes: calls to the engine"] = [one["calls"] for one in found], ""
        values[f"{nodes} nodes: memory"] = [one["memory"] for one in found], "MB"
        values[f"{nodes} nodes: share of a core"] = [one["share"] for one in found], "%"
        both = [statistics.median([one["up"] + one["down"] for one in found]), statistics.median(map(sum, raw))]
        ratios[f"{nodes} nodes up and down, orchestrate ÷ baseline (≤ 1.2)"] = both[0] / both[1]
    for what, limit in (("memory", "MB (≤ 80)"), ("share of a core", "% (≤ 2)")):
        ratios[f"{what} at {NUMBERS[-1]} nodes, {limit}"] = statistics.median(values[f"{NUMBERS[-1]} nodes: {what}"][0])
    return {"values": values, "ratios": ratios}
