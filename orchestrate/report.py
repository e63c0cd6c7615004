"""report(): what a person wants to know at the end, as data and as text. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from orchestrate.events import Event
from orchestrate.plan import Plan
from orchestrate.restarts import Ended
from orchestrate.supervisor import Outcome


def report(
    plan: Plan,
    outcome: Outcome,
    ended: Sequence[Ended],
    events: Sequence[Event],
    metrics: Iterable[str],
    checkpoints: Iterable[Path],
) -> dict[str, Any]:
    """The content of report.json; `ended` are the generations, `metrics` the lines of metrics.jsonl."""
    last = ended[-1].cause if ended else None
    return {
        "job_id": plan.job_id,
        "outcome": outcome.word,
        "reason": outcome.why,
        "engine": plan.engine,
        "world_size": plan.world_size,
        "generations": len(ended),
        "duration_s": events[-1]["seconds"] if events else 0.0,
        "root_cause": asdict(last) if last and outcome.word == "failed" else None,
        "failures": [
            {"generation": end.generation, "step": end.step, "lasted_s": end.lasted, **asdict(end.cause)}
            for end in ended
            if end.cause
        ],
        "left_behind": outcome.left,
        "checkpoints": [str(path) for path in checkpoints],
        "final_metrics": _final(metrics),
    }


def text(data: dict[str, Any]) -> str:
    """The report for a person: a line where all is well, what happened and what to do where not."""
    lines = [f"{data['outcome']}: {data['world_size']} workers, {data['duration_s']:.1f} s"]
    if data["outcome"] != "succeeded":
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
        lines += [f"whole log: {root['log']}", f"hint: {root['hint']}"]
    if data["left_behind"]:
        lines += [f"warning: nodes could not be taken down: {data['left_behind']}"]
        lines += [f"hint: python -m orchestrate stop {data['job_id']}"]
    return "\n".join(lines)


def line(event: Event) -> str:
    """What an event says to a person while the job runs; nothing, for most."""
    name = event["event"]
    if name == "generation_ended" and event["cause"]:
        return f"generation {event['generation']} failed: {event['cause']['summary']}"
    if name == "decision" and event["restart"]:
        wait = f" in {event['delay']:g} s" if event["delay"] else ""
        return f"starting all workers again{wait} ({event['why']})"
    if name == "generation_starting" and event["generation"]:
        return f"generation {event['generation']}: {event['world_size']} workers"
    if name == "node_in_trouble":
        what = {"paused": "is paused (docker unpause), and the job waits", "partition": "is cut off from the network"}
        return f"{event['node']} {what[event['trouble']]}"
    if name == "node_well":
        return f"{event['node']} is well again"
    if name == "hang":
        return f"nothing has happened for {event['after']:g} s: asking every worker where it stands"
    if name == "engine_lost":
        return f"{event['error']}; waiting for it"
    if name == "engine_back":
        return "the engine is back"
    if name == "disk_full":
        return f"the run directory cannot be written: {event['error']}; waiting"
    if name == "nodes_missing":
        return f"going on with {len(event['nodes'])} nodes, {event['missing']} fewer: {event['error']}"
    if name == "node_back":
        return "a missing node is back: going on with it after the next checkpoint"
    if name == "workers_lost":
        return f"ranks {', '.join(map(str, event['ranks']))} do not end: removing their nodes"
    return ""


def _final(metrics: Iterable[str]) -> dict[str, Any]:
    """The last value of every name; lines that are not JSON objects, such as half a last one, do not count."""
    final: dict[str, Any] = {}
    for line in metrics:
        try:
            values = json.loads(line)
        except ValueError:
            continue
        if isinstance(values, dict):
            final.update(values)
    return final
