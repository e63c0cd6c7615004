"""Cold start: four nodes and one all-reduce, from the command to its exit; the image exists, and no node is up."""

from typing import Any

from benchmarks.starts import BASELINE, OURS, PEER_STARTS, bare, interleaved, ours, plain_image, ratio


def measure(runs: int) -> dict[str, Any]:
    """Interleave the baseline, orchestrate and its peers."""
    plain_image()
    seconds, failed = interleaved({BASELINE: bare, OURS: ours, **PEER_STARTS}, runs)
    peers = [name for name in PEER_STARTS if name in seconds]
    ratios = {"orchestrate ÷ baseline (≤ 0.75)": ratio(seconds, OURS, [BASELINE])}
    if peers:
        ratios["orchestrate ÷ best peer (≤ 0.35)"] = ratio(seconds, OURS, peers)
    return {"values": {name: (found, "s") for name, found in seconds.items()}, "ratios": ratios, "failed": failed}
