"""The cost of scale: a discrete-event model of start, steps and failures, for 8 to 4,096 nodes.

    python -m benchmarks.scale

prints the table in docs/scale.md. Times are measured with this project; failure rates are published ones.
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
    """Parameters of the model, in seconds unless noted."""

    # Kokolis et al., Revisiting Reliability in Large-Scale Machine Learning Research Clusters (2024): 6.5 failures per
    # thousand node-days in the larger of two clusters, with eight GPUs per node.
    failures: float = 6.5e-3  # per node and day
    # Dubey et al., The Llama 3 Herd of Models (2024): hardware caused 78% of the unexpected interruptions.
    hardware: float = 0.78
    repair: float = 4 * 3600.0  # mean time until a host is back: an assumption
    detect_worker: float = 0.01  # the node reports it at once
    detect_host: float = 20.0  # Swarm declares a host down after 15 s, and checks every few seconds
    restart: float = 0.25  # measured by `restart`
    restart_node: float = 0.004  # the orchestrator's time per node: a connection and a request
    start: float = 2.5  # measured by `node-loss`: a container starts and imports torch
    start_node: float = 0.022  # the orchestrator's time per node at the start of a job
    held: float = 0.017  # measured by `checkpoint`: how long a checkpoint of 256 MB blocks the step
    durable: float = 0.5  # measured by `checkpoint`
    least: float = 60.0  # shortest interval between two checkpoints


@dataclass
class Course:
    """The result of a simulated job."""

    useful: float = 0.0  # node-seconds of steps that were kept
    restarts: int = 0


def interval(nodes: int, times: Times) -> float:
    """Optimal seconds between two checkpoints, by Young (1974): √(2 · cost · mean time between failures)."""
    between = DAY / (times.failures * nodes)
    return max(times.least, math.sqrt(2 * times.held * between))


def course(nodes: int, days: float, times: Times, seed: int) -> Course:
    """Simulate `days` of training on `nodes`; the job runs without a lost host until it is back, at a checkpoint.

    Events are failures of running nodes, each at a constant rate, and returns of lost hosts.
    """
    rng, found = random.Random(seed), Course()
    end, every = days * DAY, interval(nodes, times)
    up, now = nodes, times.start + nodes * times.start_node
    saved = now  # when the last checkpoint was durable
    returns: list[float] = []  # when lost hosts come back
    while now < end:
        failure = now + rng.expovariate(up * times.failures / DAY)
        returning = returns[0] if returns else end
        event = min(failure, returning, end)
        pace = up / (1 + times.held / every)  # node-seconds of steps per second, without the time blocked by saves
        if event in (end, returning):
            # The gang is restarted at the next checkpoint, with the host that is back: nothing is lost.
            found.useful += pace * (event - saved)
            cost = 0.0
            if event != end:
                heapq.heappop(returns)
                up += 1
                found.restarts += 1
                cost = times.restart + nodes * times.restart_node
            now = saved = event + cost
            continue
        kept = max(0.0, (event - saved - times.durable) // every * every)
        found.useful += pace * kept
        found.restarts += 1
        cost = times.restart + nodes * times.restart_node
        if rng.random() < times.hardware and up > 1:
            up -= 1
            heapq.heappush(returns, event + rng.expovariate(1 / times.repair))
            cost += times.detect_host
        else:
            cost += times.detect_worker
        now = saved = event + cost
    return found


def goodput(nodes: int, times: Times) -> tuple[float, float]:
    """The fraction of all nodes' time spent on steps that were kept, and restarts per day."""
    found = course(nodes, DAYS, times, SEED)
    return found.useful / (nodes * DAYS * DAY), found.restarts / DAYS


def share(nodes: int) -> float:
    """The share of a core that a Swarm's orchestrator uses while a job runs: measured with 6, 12 and 24 nodes."""
    return 0.009 + 0.00121 * nodes


def table() -> str:
    """The table, in Markdown."""
    ours = Times()
    slow = replace(ours, restart=300.0)
    lines = [
        "| nodes | failures per day | checkpoint every | restarts per day "
        "| goodput | goodput, 5 min per restart | start | share of a core |",
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
