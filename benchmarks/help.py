"""The time of `python -m orchestrate --help`, compared with a bare interpreter."""

import statistics
import subprocess
import sys
from functools import partial
from typing import Any

from benchmarks.starts import ROOT, timed


def measure(runs: int) -> dict[str, Any]:
    """Interleave both."""
    ways = {"python -c pass": ["-c", "pass"], "python -m orchestrate --help": ["-m", "orchestrate", "--help"]}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(2 * runs):
        for name, arguments in ways.items():
            start = partial(subprocess.run, [sys.executable, *arguments], check=True, capture_output=True, cwd=ROOT)
            seconds[name].append(timed(start))
    median = statistics.median(seconds["python -m orchestrate --help"])
    values = {name: (found, "s") for name, found in seconds.items()}
    return {"values": values, "ratios": {"in seconds (≤ 0.25)": median}}
