"""report(): what a person wants to know at the end, as data and as text. Pure."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from orchestrate.plan import Plan
from orchestrate.supervisor import Outcome

# What the last lines of a failed worker tell about the way out; the first match counts.
HINTS = [
    (r"No module named '?([\w.]+)", r"\1 is not installed where the workers run: name an image that has it (--image)"),
    (r"can't open file", "the script is not below the folder that you started from"),
    (r"Read-only file system|Permission denied", "nodes see your folder read-only: write to the folder in $JOB_DIR"),
    (r"No space left on device", "free some disk, or some /dev/shm (--set shm_size=4g)"),
    (r"CUDA out of memory|OutOfMemoryError", "lower the batch size, or use GPUs with more memory"),
    (r"DataLoader worker .* killed by signal: Bus", "give the nodes more shared memory: --set shm_size=4g"),
    (
        r"terminate called without an active exception",
        "torch's threads still ran when the script ended: call torch.distributed.destroy_process_group() last",
    ),
    (r"error: unrecognized arguments|error: argument|the following arguments are required", "see the script's --help"),
]
BY_CODE = {
    137: "somebody, or the kernel for lack of memory, killed it: see dmesg on the host",
    139: "it crashed in native code: PYTHONFAULTHANDLER=1 (--set env.PYTHONFAULTHANDLER=1) shows where",
    135: "/dev/shm was full, most likely: --set shm_size=4g",
}


def report(
    plan: Plan,
    outcome: Outcome,
    events: list[dict[str, Any]],
    metrics: Iterable[str],
    checkpoints: Iterable[Path],
    tail: list[str],
    log: Path | None,
) -> dict[str, Any]:
    """The content of report.json; `metrics` are the lines of metrics.jsonl, `tail` the root cause's last lines."""
    root = None
    if outcome.root:
        root = {
            "rank": outcome.root.rank,
            "node": plan.workers[outcome.root.rank].node,
            "exit_code": outcome.root.code,
            "cause": outcome.cause,
            "summary": _summary(plan, outcome),
            "last_lines": tail,
            "log": str(log),
            "hint": _hint(plan, outcome, "\n".join(tail)),
        }
    return {
        "job_id": plan.job_id,
        "outcome": outcome.word,
        "reason": outcome.why,
        "engine": plan.engine,
        "world_size": plan.world_size,
        "generations": sum(event["event"] == "generation_started" for event in events),
        "duration_s": events[-1]["seconds"] if events else 0.0,
        "root_cause": root,
        "left_behind": outcome.left,
        "checkpoints": [str(path) for path in checkpoints],
        "final_metrics": _final(metrics),
    }


def text(data: dict[str, Any]) -> str:
    """The report for a person: a line where all is well, what happened and what to do where not."""
    lines = [f"{data['outcome']}: {data['world_size']} workers, {data['duration_s']:.1f} s"]
    if data["outcome"] != "succeeded":
        lines[0] += f" ({data['reason']})"
    root = data["root_cause"]
    if root:
        lines += [f"first to fail: {root['summary']}"]
        lines += [f"    {line}" for line in root["last_lines"]]
        lines += [f"whole log: {root['log']}", f"hint: {root['hint']}"]
    if data["left_behind"]:
        lines += [f"warning: nodes could not be taken down: {data['left_behind']}"]
        lines += [f"hint: python -m orchestrate stop {data['job_id']}"]
    return "\n".join(lines)


def _summary(plan: Plan, outcome: Outcome) -> str:
    assert outcome.root
    rank, code, cause = outcome.root.rank, outcome.root.code, outcome.cause
    who = f"rank {rank} on {plan.workers[rank].node}"
    if cause == "oom":
        return f"{who} ran out of memory: the kernel killed it (exit code {code})"
    if cause == "node lost":
        return f"{who} was lost with its node, which ended (exit code {code})"
    if code > 128 and code - 128 in signal.valid_signals():
        return f"{who} was ended by {signal.Signals(code - 128).name} (exit code {code})"
    return f"{who} exited with code {code}"


def _hint(plan: Plan, outcome: Outcome, tail: str) -> str:
    assert outcome.root
    if outcome.cause == "oom":
        return "raise the limit (--set memory=8g), or lower the batch size"
    if outcome.cause == "node lost":
        return "somebody removed or stopped the container, or it failed: see docker events"
    for pattern, hint in HINTS:
        match = re.search(pattern, tail)
        if match:
            return match.expand(hint)
    return BY_CODE.get(outcome.root.code, "the lines above are the end of its log; the cause may stand further up")


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
