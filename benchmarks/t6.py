"""One node against two, a core each, the same global batch: speed-up, and whether the losses agree."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ARGUMENTS = ["--epochs", "1", "--optimizer", "sgd", "--batch-size", "256"]


def run(workers: int) -> tuple[float, list[float]]:
    """Seconds of the epoch, without start and evaluation of the others, and the loss of each step."""
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {"PYTHONPATH": os.getcwd()}
        script = ["--set", "env.OMP_NUM_THREADS=1", "--", "-m", "app.train", *ARGUMENTS]
        command = ["run", "--engine", "process", "--gpus", "none", "--trainers", str(workers - 1), "--runs", folder]
        subprocess.run(
            [sys.executable, "-m", "orchestrate", *command, *script], env=env, check=True, capture_output=True
        )
        (path,) = Path(folder).glob("*/metrics.jsonl")
        records = [json.loads(text) for text in path.read_text().splitlines()]
    return records[-1]["seconds"], [record["loss"] for record in records if record["kind"] == "step"]


def measure(runs: int) -> dict[str, Any]:
    """Interleaved runs of one and two nodes."""
    seconds: dict[int, list[float]] = {1: [], 2: []}
    worst = 0.0
    for _ in range(runs):
        losses = {}
        for workers in (1, 2):
            took, losses[workers] = run(workers)
            seconds[workers].append(took)
        worst = max([worst, *(abs(one - two) for one, two in zip(losses[1], losses[2]))])
    values = {f"epoch with {workers} node(s)": (took, "s") for workers, took in seconds.items()}
    speed_up = statistics.median(seconds[1]) / statistics.median(seconds[2])
    return {"values": values, "ratios": {"speed-up (≥ 1.85)": speed_up, "largest difference of a loss": worst}}
