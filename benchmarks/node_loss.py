"""Loss of a node: from the SIGKILL of a container until every rank has completed another step; four nodes."""

import statistics
import time
from typing import Any

from benchmarks.restart import Ours, Torchrun, restarts
from benchmarks.starts import PLAIN, docker, plain_image

REPLACED_AFTER = 8.0  # seconds until a lost node has been replaced and has imported torch
IMPORT = "import time, torch, torch._dynamo, torch.distributed; print(time.time())"


def baseline() -> float:
    """Seconds until a new container has imported torch."""
    started = time.time()
    return float(docker("run", "--rm", "--init", PLAIN, "python", "-c", IMPORT)) - started


def measure(runs: int) -> dict[str, Any]:
    """Per run: two kills without and two with a standby node, one under torchrun, and one baseline."""
    plain_image()
    found = {"container start and import (baseline)": [baseline() for _ in range(runs)]}
    failed = 0
    for name, spares in (("without a standby node", "0"), ("with a standby node", "1")):
        found[name], lost = restarts(Ours("--spares", spares), "kill_node", 2 * runs, REPLACED_AFTER)
        failed += lost
    theirs = [restarts(Torchrun(), "kill_node", 1) for _ in range(runs)]
    if recovered := [second for seconds, _ in theirs for second in seconds]:
        found["torchrun, if it recovered"] = recovered
    start, without, standby = (statistics.median(seconds) for seconds in list(found.values())[:3])
    ratios = {
        "without a standby node ÷ baseline (≤ 1.1)": without / start,
        "with a standby node, in seconds (≤ 0.8)": standby,
        f"jobs lost in {4 * runs} kills (≤ 0)": float(failed),
        f"jobs lost by torchrun in {runs} kills": float(sum(lost for _, lost in theirs)),
    }
    return {"values": {name: (seconds, "s") for name, seconds in found.items()}, "ratios": ratios}
