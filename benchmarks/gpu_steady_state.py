"""Steady state: samples per second of the app on one GPU, under `orchestrate run`, `python` and torchrun."""

import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from app import data
from benchmarks import gpu

EPOCHS = {"lenet": 30, "mnist": 30, "resnet18": 8}
OPTIONS = ("--trainers", "0")
ARGUMENTS = ("--strategy", "single", "--batch-size", "512", "--optimizer", "sgd", "--keep", "1")
OURS, PLAIN, THEIRS = "orchestrate", "python", "torchrun"


def rate(text: str) -> float:
    """Samples per second from metrics.jsonl: samples per epoch ÷ median epoch time, without the first epoch."""
    records = [json.loads(line) for line in text.splitlines()]
    epochs = [record for record in records if record["kind"] == "epoch"]
    return float(epochs[0]["samples"] / statistics.median(record["seconds"] for record in epochs[1:]))


def measure(runs: int) -> dict[str, Any]:
    """Interleave the launchers; each run trains all models."""
    data.load("digits", data.HOME, download=False)  # generated before the first measurement
    failed = {} if gpu.HAS_TORCHVISION else {"resnet18": "the Python package torchvision is missing"}
    models = [model for model in EPOCHS if model not in failed]
    script = ["-m", "benchmarks.gpu_train", *(f"{model}:{EPOCHS[model]}" for model in models), "--", *ARGUMENTS]

    def rates(name: str, folder: Path, pattern: str) -> gpu.Figures:
        return {f"{model}: {name}": rate(gpu.metrics(folder, pattern.format(model=model))) for model in models}

    def alone(name: str, command: list[str]) -> gpu.Figures:
        with tempfile.TemporaryDirectory() as folder:
            gpu.output([*command, *script], gpu.environment(JOB_DIR=folder))
            return rates(name, Path(folder), "{model}/metrics.jsonl")

    with gpu.cluster(*gpu.ONE, *OPTIONS) as nodes:

        def ours(_: int) -> gpu.Figures:
            nodes.check(gpu.output(nodes.command(*script)))
            return rates(OURS, Path(nodes.folder), "*/job/{model}/metrics.jsonl")

        ways: dict[str, Callable[[int], gpu.Figures]] = {
            PLAIN: lambda _: alone(PLAIN, [sys.executable]),
            THEIRS: lambda _: alone(THEIRS, [*gpu.TORCHRUN, "1"]),
            OURS: ours,
        }
        values, missing = gpu.rounds(ways, runs)
    wanted = {
        f"{model}: orchestrate ÷ {peer} (≥ 0.99)": (f"{model}: {OURS}", f"{model}: {peer}")
        for model in models
        for peer in (PLAIN, THEIRS)
    }
    return gpu.result(values, "/s", gpu.ratios(values, wanted), failed | missing)
