"""Seconds from the command to 99% accuracy on digits: the default job on one node, and PyTorch's example script."""

import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from app import data
from benchmarks.mnist import EPOCHS
from benchmarks.starts import ROOT

GOAL = 99.0  # per cent of the test images


def seconds_to_goal(command: list[str]) -> float:
    """Seconds until a line reports the accuracy GOAL; raises RuntimeError if none does."""
    started = time.monotonic()
    env = os.environ | {"OMP_NUM_THREADS": str(os.cpu_count()), "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, env=env)
    assert process.stdout
    with process:
        for line in process.stdout:
            match = re.search(r"accuracy ([\d.]+)%", line)
            if match and float(match[1]) >= GOAL:
                took = time.monotonic() - started
                process.terminate()
                return took
    raise RuntimeError(f"{GOAL}% was not reached in {EPOCHS} epochs")


def measure(runs: int) -> dict[str, Any]:
    """Interleave both on all cores, each run with a different seed; on MNIST if its files exist, else on digits."""
    dataset = "mnist" if (data.HOME / "MNIST").exists() else "digits"
    data.load(dataset, data.HOME, download=False)  # generated before the first measurement
    seconds: dict[str, list[float]] = {"PyTorch's example script": [], "orchestrate run": []}
    theirs, ours = seconds.values()
    with tempfile.TemporaryDirectory() as folder:
        run = [sys.executable, "-m", "orchestrate", "run", "--engine", "process", "--gpus", "none", "--trainers", "0"]
        app = ["-m", "app.train", "--dataset", dataset, "--epochs", str(EPOCHS)]
        for seed in range(1, runs + 1):
            theirs.append(seconds_to_goal([sys.executable, "benchmarks/mnist.py", dataset, str(seed)]))
            ours.append(seconds_to_goal([*run, "--runs", folder, "--", *app, "--seed", str(seed)]))
    ratios = {"times faster (≥ 3)": statistics.median(theirs) / statistics.median(ours)}
    return {"values": {f"{name}, {dataset}": (found, "s") for name, found in seconds.items()}, "ratios": ratios}
