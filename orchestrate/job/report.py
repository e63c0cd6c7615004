"""report(): what a person wants to know at the end, as data and as text. Pure."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from orchestrate.job import events
from orchestrate.job.metrics import NAMES, PACE, plain
from orchestrate.job.outcomes import JOB_OUTCOMES, GenerationResult, JobResult, Outcome
from orchestrate.job.plan import Plan, counted

STRAGGLER_FACTOR = 2.0  # times the others' median; a worker that takes longer holds them up
ENOUGH = 5  # lines of metrics about the workers' pace that tell something
# Bytes of a list that a job can fill: all of them take a fifth of what is read back (`folder.MAX_FILE`).
MAX_LIST = 4 << 20
TROUBLES = {
    "paused": "is paused (docker unpause), and the job waits",
    "silent": "does not answer, and the job waits",
    "partition": "is cut off from the network",
}
FEW = 8  # ranks that a line names
LONGEST = 1000  # characters of a reason, which can be a node's


def report(
    plan: Plan,
    outcome: JobResult,
    ended: Sequence[GenerationResult],
    seconds: float,
    metrics: Sequence[dict[str, Any]],
    checkpoints: Iterable[Path],
    whole: bool = True,
) -> dict[str, Any]:
    """The content of report.json; `ended` are the generations, `seconds` how long it took, `metrics` what is kept
    of metrics.jsonl.

    `whole`: whether `checkpoints` are all that there are. Where a list is too long, the last of it are in the report,
    and `truncated` names it.
    """
    last = ended[-1].cause if ended else None
    failures, all_failures = _fitting(
        [
            {"generation": end.generation, "step": end.step, "lasted_s": end.lasted, **asdict(end.cause)}
            for end in ended
            if end.cause
        ]
    )
    files, all_files = _fitting([str(path) for path in checkpoints])
    final, all_final = _fitting(_final(metrics), NAMES)
    complete = {"failures": all_failures, "checkpoints": whole and all_files, "final_metrics": all_final}
    return {
        "job_id": plan.job_id,
        "outcome": outcome.word,
        "reason": outcome.why[:LONGEST],
        "engine": plan.engine,
        "world_size": plan.world_size,
        "generations": len(ended),
        "duration_s": seconds,
        "root_cause": asdict(last) if last and outcome.word == Outcome.FAILED else None,
        "failures": failures,
        "left_behind": outcome.left[:LONGEST],
        "checkpoints": files,
        "final_metrics": dict(final),
        "truncated": [key for key, all_there in complete.items() if not all_there],
        "pace": _pace(plan, metrics),
    }


def text(data: dict[str, Any]) -> str:
    """The report for a person: a line where all is well, what happened and what to do where not."""
    lines = [f"{data['outcome']}: {counted(data['world_size'], 'worker')}, {data['duration_s']:.1f} s"]
    if data["outcome"] != Outcome.SUCCEEDED:
        lines[0] += f" ({data['reason']})"
    elif data["generations"] > 1:
        lines[0] += f", {data['generations']} generations"
    root = data["root_cause"]
    for failure in data["failures"][: -1 if root else None]:
        step = f", at step {failure['step']}" if failure["step"] else ""
        lines += [f"generation {failure['generation']}: {failure['summary']}{step}"]
    if root:
        lines += [f"first to fail: {root['summary']}"]
        lines += [f"    {line}" for line in root["last_lines"]]
        lines += [f"whole log: {root['log']}", *([f"hint: {root['hint']}"] if root["hint"] else [])]
    for slow in data["pace"]:
        if slow["step_s"] > STRAGGLER_FACTOR * slow["others_s"]:
            own, others = (f"{1000 * slow[key]:.3g} ms" for key in ("step_s", "others_s"))
            lines += [f"slow: rank {slow['rank']} on {slow['node']} took {own} a step for itself, the others {others}"]
    if cut := data.get("truncated"):  # which earlier versions did not write
        lines += [f"warning: report.json does not list all {', '.join(cut)}: they are too many, or too large"]
    if data["left_behind"]:
        lines += [f"warning: nodes are left: {data['left_behind']}"]
        lines += [f"hint: python -m orchestrate stop {data['job_id']}"]
    return "\n".join(lines)


def readable(data: Any) -> bool:
    """Whether this is a report, and not what a disk has made of one."""
    try:
        return data["outcome"] in JOB_OUTCOMES and isinstance(text(data), str)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return False


def _pace(plan: Plan, metrics: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """How long each rank took for itself in a step, where the script says so: in seconds, as medians and percentiles.

    A line of metrics.jsonl says so with `rank_seconds`, a number for each rank: the mean of a few steps, without the
    time in which it waited for others.
    """
    told = [row for values in metrics if plain(row := values.get(PACE)) and isinstance(row, list)]
    told = [row for row in told if len(row) == plan.world_size and all(type(value) in (int, float) for value in row)]
    if len(told) < ENOUGH:
        return []
    columns = [sorted(column) for column in zip(*told)]
    middle = [statistics.median(column) for column in columns]
    return [
        {
            "rank": rank,
            "node": plan.workers[rank].node,
            "step_s": middle[rank],
            "step_p95_s": column[int(0.95 * len(column))],
            "others_s": statistics.median(middle[:rank] + middle[rank + 1 :] or middle),
        }
        for rank, column in enumerate(columns)
    ]


def line(event: events.Event) -> str:
    """What an event says to a person while the job runs; nothing, for most."""
    match event:
        case events.NodesUp():
            return _hosts(event.hosts)
        case events.NodesMissing():
            return f"going on with {len(event.nodes)} nodes, {event.missing} fewer: {event.error}"
        case events.GenerationStarting(generation=number) if number:
            return f"generation {number}: {event.world_size} workers"
        case events.GenerationEnded(cause=cause) if cause:
            return f"generation {event.generation} failed: {cause.summary}"
        case events.RestartDecided(restart=True):
            wait = f" in {event.delay:g} s" if event.delay else ""
            return f"starting all workers again{wait} ({event.why})"
        case events.WorkersLost():
            return f"no end of {_ranks(event.ranks)} after the grace period: removing the nodes"
        case events.NodeInTrouble():
            return f"{event.node} {TROUBLES.get(event.trouble, event.trouble)}"
        case events.NodeWell():
            return f"{event.node} is well again"
        case events.NodeBack():
            return "a missing node is back: going on with it after the next checkpoint"
        case events.HangFound():
            return f"nothing has happened for {event.after:g} s: asking every worker where it stands"
        case events.EngineLost():
            return f"{event.error}; waiting for it"
        case events.EngineBack():
            return "the engine is back"
        case events.DiskFull():
            return f"the run directory cannot be written: {event.error}; waiting"
        case events.WarningIssued():
            return f"warning: {event.text}"
    return ""


def phase(event: events.Event) -> str | None:
    """What goes on from an event on, in a few words; empty where that is over, None where nothing changes."""
    match event:
        case events.NodesStarting():
            return f"starting {counted(event.nodes, 'node')}"
        case events.GenerationStarted(imports=packages) if packages:
            return f"importing {', '.join(packages)}"
        case events.NodesUp() | events.GenerationStarted():
            return "starting the workers"
        case events.WorkersAwaited():
            return f"waiting for {_ranks(event.ranks)} to start"
        case events.WorkersStarted():
            return "waiting for the workers' first output"
        case events.NodesStopping():
            return "cleaning up"
        case events.GenerationEnded() | events.NodesDown() | events.NodesLeft():
            return ""
    return None


def _hosts(placed: dict[str, str]) -> str:
    """Which nodes each host has, where there are several."""
    hosts: dict[str, list[str]] = {}
    for node, host in placed.items():
        hosts.setdefault(host, []).append(node)
    return "; ".join(f"{host}: {', '.join(nodes)}" for host, nodes in sorted(hosts.items()))


def _ranks(ranks: Sequence[int]) -> str:
    """Ranks by number, of which the first eight are named."""
    more = f" and {len(ranks) - FEW} more" if len(ranks) > FEW else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:FEW]))}{more}"


def _final(metrics: Iterable[dict[str, Any]]) -> list[tuple[str, Any]]:
    """The last value of every name, where it is no larger than a measurement."""
    return list({name: value for values in metrics for name, value in values.items() if plain(value)}.items())


def _fitting(values: list[Any], most: int = sys.maxsize) -> tuple[list[Any], bool]:
    """The last `most` values, or as many of these as a list of the report has room for; and whether that is all."""
    count, room = 0, MAX_LIST
    for value in reversed(values[-most:]):
        room -= len(json.dumps([[value]], indent=2))  # as deep as it is in the report
        if room < 0:
            break
        count += 1
    return values[len(values) - count :], count == len(values)
