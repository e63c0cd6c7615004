"""Steady state: steps per second of two workers, compared with the same script under torchrun on the host."""

import os
import re
import statistics
import subprocess
import sys
import tempfile
from typing import Any

from benchmarks.starts import ROOT

KINDS = ("mnist", "small")


def rate(command: list[str], kind: str) -> float:
    """Steps per second of the script under a command."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    script = ["-m", "benchmarks.steady", kind]
    done = subprocess.run([*command, *script], check=True, capture_output=True, text=True, cwd=ROOT, env=env)
    return float(re.findall(r"steps per second: ([\d.]+)", done.stdout + done.stderr)[-1])


def measure(runs: int) -> dict[str, Any]:
    """Interleave torchrun, containers and local processes."""
    with tempfile.TemporaryDirectory() as folder:
        ours = [sys.executable, "-m", "orchestrate", "run", "--gpus", "none", "--trainers", "1", "--runs", folder]
        docker, process = [*ours, "--engine", "docker"], [*ours, "--engine", "process"]
        ways = {
            "torchrun on the host": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"],
            "containers, host network": [*docker, "--set", "network=host", "--"],
            "containers, bridge network": [*docker, "--"],
            "local processes": [*process, "--"],
            "local processes, pinned": [*process, "--set", "pin=true", "--"],
        }
        rates: dict[str, list[float]] = {f"{kind}: {name}": [] for kind in KINDS for name in ways}
        for _ in range(runs):
            for kind in KINDS:
                for name, command in ways.items():
                    rates[f"{kind}: {name}"].append(rate(command, kind))
    ratios = {}
    for kind in KINDS:
        base, host, bridge, local, pinned = (statistics.median(rates[f"{kind}: {name}"]) for name in ways)
        ratios[f"{kind}: host network ÷ torchrun (≥ 1.0)"] = host / base
        ratios[f"{kind}: bridge network ÷ torchrun (≥ 0.97)"] = bridge / base
        ratios[f"{kind}: local processes ÷ torchrun"] = local / base
        ratios[f"{kind}: pinned ÷ not pinned"] = pinned / local
    return {"values": {name: (found, "/s") for name, found in rates.items()}, "ratios": ratios}
