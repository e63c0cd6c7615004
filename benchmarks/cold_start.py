"""Cold start: four nodes, one all-reduce, from the command to its exit; the image is built, and nothing runs."""

from typing import Any

from benchmarks.starts import FLOOR, OURS, PEER_STARTS, against, bare, interleaved, ours, plain_image


def measure(runs: int) -> dict[str, Any]:
    """The floor, we and the peers, interleaved."""
    plain_image()
    seconds, failed = interleaved({FLOOR: bare, OURS: ours, **PEER_STARTS}, runs)
    peers = [name for name in PEER_STARTS if name in seconds]
    ratios = {"to the floor (≤ 1.15)": against(seconds, OURS, [FLOOR])}
    if peers:
        ratios["to the best peer (≤ 0.55)"] = against(seconds, OURS, peers)
    return {"values": {name: (found, "s") for name, found in seconds.items()}, "ratios": ratios, "failed": failed}
