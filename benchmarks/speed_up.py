"""One node compared with two, with one core each and the same global batch: speed-up, and equality of losses."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ARGUMENTS = ["--model", "mnist", "--dropout", "0", "--epochs", "1", "--optimizer", "sgd", "--batch-size", "256"]


def run(workers: int, core: int | None = None, *more: str) -> tuple[float, list[float]]:
    """Run the app for one epoch; return its seconds, without the start of the job, and the loss of each step."""
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {"PYTHONPATH": os.getcwd()}
        script = ["--set", "env.OMP_NUM_THREADS=1", "--", "-m", "app.train", *ARGUMENTS, *more]
        command = ["run", "--engine", "process", "--gpus", "none", "--trainers", str(workers - 1), "--runs", folder]
        pinned = ["taskset", "--cpu-list", str(core)] if core is not None else []
        subprocess.run(
            [*pinned, sys.executable, "-m", "orchestrate", *command, *script], env=env, check=True, capture_output=True
        )
        (path,) = Path(folder).glob("*/metrics.jsonl")
        records = [json.loads(text) for text in path.read_text().splitlines()]
    return [record["seconds"] for record in records if record["kind"] == "epoch"][-1], [
        record["loss"] for record in records if record["kind"] == "step"
    ]


def measure(runs: int) -> dict[str, Any]:
    """Interleave one node, two nodes of one job, and one node of each of two jobs: the most the machine can do."""
    seconds: dict[str, list[float]] = {"one node": [], "two nodes": [], "one node, next to another job": []}
    one, two, beside = seconds.values()
    for _ in range(runs):
        one.append(run(1, 0)[0])
        two.append(run(2)[0])
        with ThreadPoolExecutor() as pool:
            beside.append(statistics.mean(took for took, _ in pool.map(lambda core: run(1, core), (0, 1))))
    exact = [run(workers, None, "--dtype", "float64")[1] for workers in (1, 2)]
    medians = [statistics.median(took) for took in (one, two, beside)]
    ratios = {
        "speed-up (≥ 1.95)": medians[0] / medians[1],
        "speed-up of two independent jobs on the machine": 2 * medians[0] / medians[2],
        "largest difference in loss, in float64 (≤ 0.000001)": max(abs(a - b) for a, b in zip(*exact)),
    }
    return {"values": {f"epoch with {name}": (took, "s") for name, took in seconds.items()}, "ratios": ratios}
