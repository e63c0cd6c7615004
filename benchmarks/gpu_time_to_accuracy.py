"""Seconds from the command to 99% accuracy on one GPU: the app, with and without a cluster, and PyTorch's example."""

import json
import re
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from app import data
from benchmarks import gpu
from benchmarks.starts import ROOT

GOAL = 99.0  # per cent of the test images
OPTIONS = ("--trainers", "0")
ARGUMENTS = ("--batch-size", "256", "--optimizer", "adamw", "--lr", "0.005", "--schedule", "cosine", "--epochs", "8")
COLD, WARM, PEER = "orchestrate", "orchestrate on a cluster", "PyTorch's example script"
TRAINING = f"{WARM}: training only"


def to_goal(command: list[str], env: dict[str, str]) -> tuple[float, str]:
    """Seconds until a line reports the accuracy GOAL, and the output; raises RuntimeError if none does."""
    started = time.monotonic()
    process = gpu.start(command, env)
    limit = threading.Timer(gpu.LIMIT, process.terminate)
    limit.start()
    lines = []
    try:
        assert process.stdout
        for line in process.stdout:
            lines.append(line)
            match = re.search(r"accuracy ([\d.]+)%", line)
            if match and float(match[1]) >= GOAL:
                return time.monotonic() - started, "".join(lines)
    finally:
        limit.cancel()
        gpu.stop(process)
    raise RuntimeError(f"{GOAL:g}% was not reached; the output ends with: {gpu.reason(''.join(lines))}")


def training(text: str) -> float:
    """Seconds of the epochs until the accuracy GOAL, from metrics.jsonl; raises ValueError if it was not reached."""
    seconds = 0.0
    for record in map(json.loads, text.splitlines()):
        if record["kind"] == "epoch":
            seconds += record["seconds"]
            if round(100 * record["test_accuracy"], 2) >= GOAL:
                return float(seconds)
    raise ValueError(f"metrics.jsonl has no epoch with {GOAL:g}%")


def data_set() -> str:
    """`mnist` if its files exist, otherwise the generated `digits`."""
    return "mnist" if gpu.HAS_TORCHVISION and (data.HOME / "MNIST").exists() else "digits"


def measure(runs: int) -> dict[str, Any]:
    """Interleave the ways, each run with a different seed."""
    dataset = data_set()
    data.load(dataset, data.HOME, download=False)  # generated before the first measurement
    script = ["-m", "app.train", "--dataset", dataset, *ARGUMENTS, "--seed"]
    options = (*gpu.ONE, *OPTIONS)
    env = gpu.environment()
    with tempfile.TemporaryDirectory() as folder, gpu.cluster(*options) as nodes:

        def cold(seed: int) -> gpu.Figures:
            command = gpu.orchestrate("run", *options, "--runs", folder, "--", *script, str(seed))
            return {COLD: to_goal(command, env)[0]}

        def warm(seed: int) -> gpu.Figures:
            seconds, text = to_goal(nodes.command(*script, str(seed)), env)
            nodes.check(text)
            return {WARM: seconds, TRAINING: training(gpu.metrics(Path(nodes.folder), "*/job/metrics.jsonl"))}

        def peer(seed: int) -> gpu.Figures:
            if not gpu.HAS_TORCHVISION:
                raise RuntimeError("the Python package torchvision is missing")
            command = [sys.executable, "benchmarks/mnist.py", dataset, str(seed), gpu.DEVICE]
            return {PEER: to_goal(command, env | {"PYTHONPATH": str(ROOT)})[0]}

        warm(1)  # afterwards, torch has been imported
        values, failed = gpu.rounds({PEER: peer, COLD: cold, WARM: warm}, runs)
    ratios = gpu.medians(values, {"on a cluster, in seconds (≤ 5)": WARM, "training only, in seconds (≤ 2)": TRAINING})
    ratios |= gpu.ratios(values, {"times faster than the example": (PEER, COLD), "on a cluster": (PEER, WARM)})
    named = {f"{name}, {dataset}": found for name, found in values.items()}
    return gpu.result(named, "s", ratios, failed)
