"""What growth costs: a discrete-event model of start, steps and failures, for 8 to 4,096 nodes.

    python -m benchmarks.scale

It prints the table of docs/scale.md. Times are this project's, measured; rates of failures are published ones.
"""

import heapq
import math
import random
from dataclasses import dataclass, replace

DAY = 86400.0  # seconds
NODES = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
DAYS, SEED = 60, 1


@dataclass(frozen=True)
class Times:
    """In seconds, where nothing else is said."""

    # Kokolis and others, Revisiting Reliability in Large-Scale Machine Learning Research Clusters (2024): 6.5 failures
    # per thousand node-days in the larger of two clusters, nodes of eight GPUs.
    failures: float = 6.5e-3  # a node and day
    # Dubey and others, The Llama 3 Herd of Models (2024): 78 % of the unexpected interruptions were the hardware's.
    hardware: float = 0.78
    repair: float = 4 * 3600.0  # until a host is back: an assumption
    detect_worker: float = 0.01  # the node tells at once
    detect_host: float = 20.0  # Swarm declares a host down after 15 s, and looks every few seconds
    restart: float = 0.25  # restart: every rank is past its next step
    restart_node: float = 0.004  # of the orchestrator, for each node: a connection, a request
    start: float = 2.5  # node-loss: a container starts and imports torch
    start_node: float = 0.022  # of the orchestrator, for each node of a job that starts
    held: float = 0.017  # checkpoint: a checkpoint of 256 MB
    durable: float = 0.5  # checkpoint
    least: float = 60.0  # between two checkpoints


@dataclass
class Course:
    """What came of a job."""

    useful: float = 0.0  # node-seconds of steps that were kept
    restarts: int = 0


def interval(nodes: int, times: Times) -> float:
    """Seconds between two checkpoints that lose least, by Young (1974): √(2 · cost · mean time between failures)."""
    between = DAY / (times.failures * nodes)
    return max(times.least, math.sqrt(2 * times.held * between))


def course(nodes: int, days: float, times: Times, seed: int) -> Course:
    """Train for some days on so many nodes; a lost host is done without until it is back, at a checkpoint.

    Events are failures of nodes that are up, which come at a constant rate each, and hosts that are back.
    """
    dice, found = random.Random(seed), Course()
    end, every = days * DAY, interval(nodes, times)
    up, now = nodes, times.start + nodes * times.start_node
    saved = now  # when the last checkpoint was durable
    back: list[float] = []  # when lost hosts come back
    while now < end:
        failure = now + dice.expovariate(up * times.failures / DAY)
        returning = back[0] if back else end
        event = min(failure, returning, end)
        pace = up / (1 + times.held / every)  # node-seconds of steps in a second, without what saves hold up
        if event in (end, returning):
            # The gang is stopped at the next checkpoint, and starts again with the host that is back: nothing is lost.
            found.useful += pace * (event - saved)
            cost = 0.0
            if event != end:
                heapq.heappop(back)
                up += 1
                found.restarts += 1
                cost = times.restart + nodes * times.restart_node
            now = saved = event + cost
            continue
        kept = max(0.0, (event - saved - times.durable) // every * every)
        found.useful += pace * kept
        found.restarts += 1
        cost = times.restart + nodes * times.restart_node
        if dice.random() < times.hardware and up > 1:
            up -= 1
            heapq.heappush(back, event + dice.expovariate(1 / times.repair))
            cost += times.detect_host
        else:
            cost += times.detect_worker
        now = saved = event + cost
    return found


def goodput(nodes: int, times: Times) -> tuple[float, float]:
    """The fraction of all nodes' time that went into steps that were kept, and restarts a day."""
    found = course(nodes, DAYS, times, SEED)
    return found.useful / (nodes * DAYS * DAY), found.restarts / DAYS


def share(nodes: int) -> float:
    """Of a core, that the orchestrator of a Swarm needs while a job runs: measured at 6, 12 and 24 nodes."""
    return 0.009 + 0.00121 * nodes


def table() -> str:
    """The table, in Markdown."""
    ours = Times()
    slow = replace(ours, restart=300.0)
    lines = [
        "| nodes | failures a day | checkpoint every | restarts a day "
        "| goodput | goodput, 5 min a restart | start | core |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for nodes in NODES:
        good, restarts = goodput(nodes, ours)
        lines.append(
            f"| {nodes} | {nodes * ours.failures:.2f} | {interval(nodes, ours):.0f} s | {restarts:.1f} | {good:.2%} "
            f"| {goodput(nodes, slow)[0]:.2%} | {ours.start + nodes * ours.start_node:.1f} s | {share(nodes):.0%} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
