"""Warm start: the same as `cold-start`, on nodes that are up."""

import tempfile
from typing import Any

from benchmarks.starts import FLOOR, NODES, SCRIPT, against, bare, interleaved, orchestrate, plain_image


def measure(runs: int) -> dict[str, Any]:
    """The floor and we, interleaved."""
    plain_image()
    with tempfile.TemporaryDirectory() as folder:
        options = ["--gpus", "none", "--trainers", str(NODES - 1), "--runs", folder]
        cluster = orchestrate("up", *options).strip()
        try:

            def warm() -> None:
                orchestrate("run", *options, "--", SCRIPT)

            warm()  # when it ends, torch has been imported
            seconds, failed = interleaved({FLOOR: bare, "orchestrate on nodes that are up": warm}, runs)
        finally:
            orchestrate("down", cluster, "--runs", folder)
    ratios = {"to the floor (≤ 0.1)": against(seconds, "orchestrate on nodes that are up", [FLOOR])}
    return {"values": {name: (found, "s") for name, found in seconds.items()}, "ratios": ratios, "failed": failed}
