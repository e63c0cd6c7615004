"""A node is lost: from the SIGKILL of a container to the moment when every rank is past its next step; four nodes."""

import statistics
from typing import Any

from benchmarks.t3 import Ours, restarts

BACK = 8.0  # seconds in which a node that was lost is back, and has imported torch


def measure(runs: int) -> dict[str, Any]:
    """Two kills for each run that is asked for, without and with a spare node."""
    found, failed = {}, 0
    for name, spares in (("without a spare node", "0"), ("with a spare node", "1")):
        found[name], lost = restarts(Ours("--spares", spares), "kill_node", 2 * runs, BACK)
        failed += lost
    ratios = {
        "with a spare node, in seconds (≤ 1.5)": statistics.median(found["with a spare node"]),
        "restarts that failed (≤ 0)": float(failed),
    }
    return {"values": {name: (seconds, "s") for name, seconds in found.items()}, "ratios": ratios}
