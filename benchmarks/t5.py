"""Steady state: steps per second of two workers, against the same script under torchrun on the host."""

import os
import re
import statistics
import subprocess
import sys
import tempfile
from typing import Any

from benchmarks.starts import ROOT

SCRIPT = "benchmarks/steady.py"


def rate(command: list[str]) -> float:
    """What the script prints under a command."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT, env=env)
    return float(re.findall(r"steps per second: ([\d.]+)", done.stdout + done.stderr)[-1])


def measure(runs: int) -> dict[str, Any]:
    """torchrun, containers and local processes, interleaved."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", SCRIPT]
    with tempfile.TemporaryDirectory() as folder:
        ours = [sys.executable, "-m", "orchestrate", "run", "--gpus", "none", "--trainers", "1", "--runs", folder]
        ways = {
            "torchrun on the host": torchrun,
            "containers on a bridge": [*ours, "--engine", "docker", "--", SCRIPT],
            "containers on the host's network": [*ours, "--engine", "docker", "--set", "network=host", "--", SCRIPT],
            "local processes": [*ours, "--engine", "process", "--", SCRIPT],
            "local processes, pinned": [*ours, "--engine", "process", "--set", "pin=true", "--", SCRIPT],
        }
        rates: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(runs):
            for name, command in ways.items():
                rates[name].append(rate(command))
    base, bridge, host, process, pinned = (statistics.median(found) for found in rates.values())
    ratios = {
        "on the host's network, to torchrun (≥ 0.99)": host / base,
        "on the bridge, to torchrun (≥ 0.97)": bridge / base,
        "local processes, to torchrun": process / base,
        "pinned, to not pinned": pinned / process,
    }
    return {"values": {name: (found, "/s") for name, found in rates.items()}, "ratios": ratios}
