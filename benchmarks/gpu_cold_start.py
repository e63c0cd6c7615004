"""Start on GPUs: one worker per GPU all-reduces a CUDA tensor with NCCL, from the command to its exit."""

import json
import re
import sys
import tempfile
import time
from typing import Any

from benchmarks import gpu
from orchestrate.engines.ports import free_port

SCRIPT = "benchmarks/gpu_start.py"
COLD, WARM = "orchestrate", "orchestrate on a cluster"


def parts(text: str) -> gpu.Figures:
    """Seconds by part, each on the slowest worker, from the JSON lines in an output; raises ValueError if none."""
    found = [json.loads(line) for line in re.findall(r'(\{"import torch": .*\})', text)]
    if not found:
        raise ValueError("the script printed no times")
    return {part: max(one[part] for one in found) for part in found[0]}


def measured(name: str, command: list[str], env: dict[str, str]) -> tuple[gpu.Figures, str]:
    """Run a command; return its seconds, in total and by part, and its output."""
    started = time.monotonic()
    text = gpu.output(command, env)
    took = time.monotonic() - started
    return {name: took} | {f"{name}: {part}": seconds for part, seconds in parts(text).items()}, text


def bare(name: str, workers: int) -> gpu.Figures:
    """Run without orchestrate: plain Python for one worker, torchrun for several."""
    if workers > 1:
        env = gpu.environment(workers)
        return measured(name, [*gpu.TORCHRUN, str(workers), SCRIPT, gpu.DEVICE], env)[0]
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    env = gpu.environment() | ranks | {"MASTER_PORT": str(free_port())}
    return measured(name, [sys.executable, SCRIPT, gpu.DEVICE], env)[0]


def measure(runs: int) -> dict[str, Any]:
    """Interleave runs without orchestrate, with `run`, and with `run` on a cluster."""
    workers, options = max(1, gpu.count()), (*gpu.ALL, "--trainers", "0")
    env = gpu.environment(workers)
    base = "python" if workers == 1 else "torchrun"
    with tempfile.TemporaryDirectory() as folder, gpu.cluster(*options) as nodes:

        def cold(_: int) -> gpu.Figures:
            return measured(COLD, gpu.orchestrate("run", *options, "--runs", folder, "--", SCRIPT, gpu.DEVICE), env)[0]

        def warm(_: int) -> gpu.Figures:
            figures, text = measured(WARM, nodes.command(SCRIPT, gpu.DEVICE), env)
            nodes.check(text)
            return figures

        warm(0)  # afterwards, torch has been imported
        values, failed = gpu.rounds({base: lambda _: bare(base, workers), COLD: cold, WARM: warm}, runs)
    ratios = gpu.ratios(values, {f"orchestrate ÷ {base}": (COLD, base), f"on a cluster ÷ {base}": (WARM, base)})
    return gpu.result(values, "s", ratios, failed)
