"""A node is lost: from the SIGKILL of a container to the moment when every rank is past its next step; four nodes."""

import statistics
import time
from typing import Any

from benchmarks.restart import Ours, Torchrun, restarts
from benchmarks.starts import PLAIN, docker, plain_image

BACK = 8.0  # seconds in which a node that was lost is back, and has imported torch
IMPORT = "import time, torch, torch._dynamo, torch.distributed; print(time.time())"


def floor() -> float:
    """Seconds until a new container has imported torch."""
    began = time.time()
    return float(docker("run", "--rm", "--init", PLAIN, "python", "-c", IMPORT)) - began


def measure(runs: int) -> dict[str, Any]:
    """For each run that is asked for: two kills without and two with a spare node, one of torchrun's, one floor."""
    plain_image()
    found = {"a container's start, and import (the floor)": [floor() for _ in range(runs)]}
    failed = 0
    for name, spares in (("without a spare node", "0"), ("with a spare node", "1")):
        found[name], lost = restarts(Ours("--spares", spares), "kill_node", 2 * runs, BACK)
        failed += lost
    theirs = [restarts(Torchrun(), "kill_node", 1) for _ in range(runs)]
    if back := [second for seconds, _ in theirs for second in seconds]:
        found["torchrun, where it came back"] = back
    start, without, spare = (statistics.median(seconds) for seconds in list(found.values())[:3])
    ratios = {
        "without a spare node, to the floor (≤ 1.2)": without / start,
        "with a spare node, in seconds (≤ 1.5)": spare,
        f"jobs lost of {4 * runs} kills (≤ 0)": float(failed),
        f"jobs that torchrun lost of {runs} kills": float(sum(lost for _, lost in theirs)),
    }
    return {"values": {name: (seconds, "s") for name, seconds in found.items()}, "ratios": ratios}
