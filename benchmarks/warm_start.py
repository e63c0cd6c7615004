"""Warm start: the same as `cold-start`, on a cluster."""

import tempfile
from typing import Any

from benchmarks.starts import BASELINE, NODES, SCRIPT, bare, interleaved, orchestrate, plain_image, ratio


def measure(runs: int) -> dict[str, Any]:
    """Interleave the baseline and orchestrate."""
    plain_image()
    with tempfile.TemporaryDirectory() as folder:
        options = ["--gpus", "none", "--trainers", str(NODES - 1), "--runs", folder]
        cluster = orchestrate("up", *options).strip()
        try:

            def warm() -> None:
                orchestrate("run", *options, "--", SCRIPT)

            warm()  # afterwards, torch has been imported
            seconds, failed = interleaved({BASELINE: bare, "orchestrate on a cluster": warm}, runs)
        finally:
            orchestrate("down", cluster, "--runs", folder)
    ratios = {"orchestrate ÷ baseline (≤ 0.06)": ratio(seconds, "orchestrate on a cluster", [BASELINE])}
    return {"values": {name: (found, "s") for name, found in seconds.items()}, "ratios": ratios, "failed": failed}
