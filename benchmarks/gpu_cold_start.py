"""Start on GPUs: a CUDA tensor, all-reduced by one worker per GPU with NCCL, from the command to its exit."""

import json
import re
import sys
import tempfile
import time
from typing import Any

from benchmarks import gpu
from orchestrate.engines.ports import free_port

SCRIPT = "benchmarks/gpu_start.py"
COLD, WARM = "orchestrate", "orchestrate, nodes up"


def parts(text: str) -> gpu.Figures:
    """Seconds by part, each of the slowest worker, out of the JSON lines in an output; raises ValueError if none."""
    found = [json.loads(line) for line in re.findall(r'(\{"import torch": .*\})', text)]
    if not found:
        raise ValueError("the script printed no times")
    return {part: max(one[part] for one in found) for part in found[0]}


def measured(name: str, command: list[str], env: dict[str, str]) -> tuple[gpu.Figures, str]:
    """Seconds of a command and of its parts, by label; and its output."""
    began = time.monotonic()
    text = gpu.output(command, env)
    took = time.monotonic() - began
    return {name: took} | {f"{name}: {part}": seconds for part, seconds in parts(text).items()}, text


def bare(name: str, workers: int) -> gpu.Figures:
    """Python without a launcher for one worker, torchrun for several."""
    if workers > 1:
        env = gpu.environment(workers)
        return measured(name, [*gpu.TORCHRUN, str(workers), SCRIPT, gpu.DEVICE], env)[0]
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    env = gpu.environment() | place | {"MASTER_PORT": str(free_port())}
    return measured(name, [sys.executable, SCRIPT, gpu.DEVICE], env)[0]


def measure(runs: int) -> dict[str, Any]:
    """Interleaved: without orchestrate, by `run`, and by `run` on nodes that are up."""
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

        warm(0)  # when it ends, torch has been imported
        values, failed = gpu.rounds({base: lambda _: bare(base, workers), COLD: cold, WARM: warm}, runs)
    ratios = gpu.ratios(values, {f"orchestrate, to {base}": (COLD, base), f"nodes up, to {base}": (WARM, base)})
    return gpu.result(values, "s", ratios, failed)
