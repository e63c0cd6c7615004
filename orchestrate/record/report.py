"""report(): the result of a job, as data and as text. Pure."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from orchestrate.console import shortened
from orchestrate.dataclass import dataclass
from orchestrate.plan.plan import Plan, pluralize
from orchestrate.record import events
from orchestrate.record.metrics import NAMES, PACE, TOTAL, is_number, plain, strict
from orchestrate.record.outcomes import JOB_OUTCOMES, Cause, GenerationResult, JobResult, Outcome

LONG = 5.0  # seconds of preparation that are worth a word
WORTH = 3.0  # seconds of a generation whose loss is worth a warning
NO_CHECKPOINTS = "$JOB_DIR/checkpoints is empty: unless the script saves elsewhere"
SAVED = (".ckpt", ".pt", ".pth", ".safetensors")  # files that may be checkpoints
STRAGGLER_FACTOR = 2.0  # times the others' median; a worker that takes longer slows them down
MIN_ROWS = 5  # rows of `rank_seconds` needed for statistics
# Bytes of a list that a job can fill: all lists together take a fifth of what can be read (`folder.MAX_FILE`).
MAX_LIST = 4 << 20
TROUBLES = {
    "paused": "is paused; the job waits (to resume: docker unpause)",
    "silent": "does not respond; the job waits",
    "partition": "is cut off from the network",
}
MAX_SKIPPED = 100  # files that are listed as not copied
MAX_RANKS = 8  # ranks listed in a line
MAX_ERROR = 200  # characters of an exception
EXCEPTION = r"(?:\[rank\d+\]: )?([\w.]+(?:Error|Exception)\b.*)"  # compiled only for a job that has failed
MAX_REASON = 1000  # characters of a reason, which may come from a node


@dataclass(frozen=True)
class Copied:
    """A copy of a job's files in an object store."""

    what: str  # checkpoints or output
    url: str
    files: int  # copied by this process
    error: str  # why not all files are copied; empty if they are
    hint: str
    skipped: list[str]  # files that cannot be copied, with the reason


@dataclass(frozen=True)
class Written:
    """The files that workers wrote to their working directory."""

    folder: Path
    files: list[str]  # paths in it
    complete: bool  # whether these are all


def report(
    plan: Plan,
    result: JobResult,
    ended: Sequence[GenerationResult],
    seconds: float,
    metrics: Sequence[dict[str, Any]],
    checkpoints: Iterable[Path],
    whole: bool = True,
    written: Written | None = None,
    copies: Sequence[Copied] = (),
    prepared: float = 0.0,
) -> dict[str, Any]:
    """The content of report.json; lists that are too long keep their last items, and are named in `truncated`.

    `ended` are the generations, `seconds` the duration of the job, and `prepared` that of its preparation. `metrics` is
    what is kept of metrics.jsonl, and `whole` is whether `checkpoints` lists all checkpoints. `written` are the files
    in the job's own working directory, if it has one; `copies` are those in object stores.
    """
    last = ended[-1].cause if ended else None
    failures, all_failures = _fitting([_failure(end, end.cause) for end in ended if end.cause])
    files, all_files = _fitting([str(path) for path in checkpoints])
    outputs, all_outputs = _fitting(written.files if written else [])
    final, all_final = _fitting(_final(metrics), NAMES)
    complete = {
        "failures": all_failures,
        "checkpoints": whole and all_files,
        "written": all_outputs and (written is None or written.complete),
        "final_metrics": all_final,
    }
    return {
        "job_id": plan.job_id,
        "outcome": result.outcome,
        "reason": result.why[:MAX_REASON],
        "engine": plan.engine,
        "code": plan.placement.code,
        "commit": plan.placement.revision.removesuffix("-dirty"),
        "dirty": plan.placement.revision.endswith("-dirty"),
        "world_size": plan.world_size,
        "generations": len(ended),
        "duration_s": seconds,
        "preparation_s": prepared,
        "root_cause": asdict(last) if last and result.outcome == Outcome.FAILED else None,
        "failures": failures,
        "left_behind": result.left[:MAX_REASON],
        "checkpoints": files,
        "working_directory": str(written.folder) if written else "",
        "written": outputs,
        "copies": [{**asdict(copy), "skipped": copy.skipped[:MAX_SKIPPED]} for copy in copies],
        "final_metrics": dict(final),
        "truncated": [key for key, is_complete in complete.items() if not is_complete],
        "pace": _pace(plan, metrics),
        "exchanged_bytes": [ended[-1].exchanged.get(rank) for rank in range(plan.world_size)] if ended else [],
        "torch": [*ended[-1].versions] if ended else [],
        "isolated": ended[-1].isolated if ended else "",
    }


def _failure(end: GenerationResult, cause: Cause) -> dict[str, Any]:
    return {"generation": end.generation, "step": end.step, "lasted_s": end.lasted, **asdict(cause)}


def text(data: dict[str, Any]) -> str:
    """The report for display: one line on success, otherwise what failed and how to fix it."""
    lines = [f"{data['outcome']}: {pluralize(data['world_size'], 'worker')}, {data['duration_s']:.1f} s"]
    if (prepared := data.get("preparation_s", 0.0)) >= LONG:
        lines[0] += f" after {prepared:.1f} s of preparation"
    if data["outcome"] != Outcome.SUCCEEDED:
        lines[0] += f" ({data['reason']})"
    elif data["generations"] > 1:
        lines[0] += f", {data['generations']} generations"
    step, total = (data.get("final_metrics", {}).get(name) for name in ("step", TOTAL))
    if data["outcome"] == Outcome.SUCCEEDED and is_number(step) and is_number(total) and step < total:
        lines[0] += f", at step {step} of {total}"  # on a signal that we have not sent, for example
    root = data["root_cause"]
    for failure in data["failures"][: -1 if root else None]:
        step = f", at step {failure['step']}" if failure["step"] else ""
        lines += [f"generation {failure['generation']}: {failure['summary']}{step}{_error(failure)}"]
    if root:
        lines += [f"root cause: {root['summary']}"]
        lines += [f"    {line}" for line in root["last_lines"]]
        lines += [f"full log: {root['log']}", *([f"hint: {root['hint']}"] if root["hint"] else [])]
    for slow in data["pace"]:
        if slow["step_s"] > STRAGGLER_FACTOR * slow["others_s"]:
            own, others = (f"{1000 * slow[key]:.3g} ms" for key in ("step_s", "others_s"))
            lines += [
                f"slow: rank {slow['rank']} on {slow['node']} spent {own} per step on its own work, the others {others}"
            ]
    if files := data["written"]:
        lines += [f"the workers wrote {pluralize(len(files), 'file')}: {data['working_directory']}"]
    for copy in data["copies"]:
        lines += _copy_lines(copy)
    worth = any(failure.get("lasted_s", 0.0) > WORTH for failure in data["failures"])
    if data["generations"] > 1 and worth and not data["checkpoints"]:
        lines += [f"warning: {NO_CHECKPOINTS}, it started over"]
        if saved := next((file for file in files if file.endswith(SAVED)), ""):
            lines += [f"hint: if {saved} is a checkpoint, let the script save it to $JOB_DIR/checkpoints"]
    if advice := data["isolated"]:
        lines += [
            f"warning: the {data['world_size']} workers exchanged no data: if they train, each trained its own model"
        ]
        lines += [f"hint: {advice}"]
    if cut := data["truncated"]:
        lines += [f"warning: report.json does not list all {', '.join(cut)}: too many or too large"]
    if data["left_behind"]:
        lines += [f"warning: not all nodes were removed: {data['left_behind']}"]
        lines += [f"hint: python -m orchestrate stop {data['job_id']}"]
    return "\n".join(lines)


def _error(failure: dict[str, Any]) -> str:
    """The exception with which a worker has ended, after a colon; empty if its last lines name none."""
    named = [match[1] for line in failure["last_lines"] if (match := re.match(EXCEPTION, line))]
    return f": {shortened(named[-1], MAX_ERROR)}" if named and failure["exit_code"] < 128 else ""


def _copy_lines(copy: dict[str, Any]) -> list[str]:
    """The lines about a copy in an object store."""
    lines = [f"warning: {copy['what']} not copied: {each}" for each in copy["skipped"][:MAX_RANKS]]
    if not copy["error"]:
        return [f"{copy['what']} copied to {copy['url']}", *lines]
    hint = [f"hint: {copy['hint']}"] if copy["hint"] else []
    return [f"warning: {copy['what']} not copied completely to {copy['url']}: {copy['error']}", *hint, *lines]


def readable(data: Any) -> bool:
    """Whether `data` is a valid report; the file may be damaged."""
    try:
        return data["outcome"] in JOB_OUTCOMES and isinstance(text(data), str)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return False


def _pace(plan: Plan, metrics: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Seconds per step that each rank spent on its own work, as medians and 95th percentiles; empty if unknown.

    A script reports them in metrics.jsonl as `rank_seconds`, a number for each rank: the mean of a few steps, without
    the time spent waiting for other ranks.
    """
    import statistics  # only here: it takes time to import

    rows = [row for values in metrics if plain(row := values.get(PACE)) and isinstance(row, list)]
    rows = [row for row in rows if len(row) == plan.world_size and all(map(is_number, row))]
    if len(rows) < MIN_ROWS:
        return []
    columns = [sorted(column) for column in zip(*rows)]
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
    """The message to display for an event while the job runs; empty for most events."""
    match event:
        case events.CheckpointsFetched():
            return f"fetched {pluralize(event.files, 'file')} of checkpoints that {event.job} copied to {event.url}"
        case events.NodesUp():
            return _hosts(event.hosts)
        case events.NodesMissing():
            return f"continuing with {len(event.nodes)} nodes, {event.missing} fewer: {event.error}"
        case events.GenerationStarting(generation=number) if number:
            return f"generation {number}: {event.world_size} workers"
        case events.GenerationEnded(outcome=Outcome.REQUEUED):
            return "the allocation ends: the workers have stopped"
        case events.GenerationEnded(cause=cause) if cause:
            return f"generation {event.generation} failed: {cause.summary}"
        case events.RestartDecided(restart=True):
            wait = f" in {event.delay:g} s" if event.delay else ""
            return f"restarting all workers{wait} ({event.why})"
        case events.WorkersLost():
            return f"{name_ranks(event.ranks)} did not exit within the grace period: removing the nodes"
        case events.NodeInTrouble():
            return f"{event.node} {TROUBLES.get(event.trouble, event.trouble)}"
        case events.NodeWell():
            return f"{event.node} has recovered"
        case events.NodeBack():
            return "a missing node is back: restarting with it after the next checkpoint"
        case events.HangFound():
            return f"no activity for {event.after:g} s: collecting stack traces of all workers"
        case events.WorkersIsolated():
            return (
                f"warning: the {event.world_size} workers have exchanged no data in the first minute: if they train "
                f"already, each trains its own model\nhint: {event.hint}"
            )
        case events.GpusUnused():
            return f"warning: {name_ranks(event.ranks)} did not use the GPU in the first minute"
        case events.EngineLost():
            return f"{event.error}; waiting for the engine"
        case events.EngineBack():
            return "the engine is back"
        case events.DiskFull():
            return f"warning: cannot write to the run directory: {event.error}; waiting for five minutes at most"
        case events.WarningIssued():
            return f"warning: {event.text}"
    return ""


def phase(event: events.Event) -> str | None:
    """The status to display from an event on: empty to clear it, None to leave it unchanged."""
    match event:
        case events.NodesStarting():
            return f"starting {pluralize(event.nodes, 'node')}"
        case events.GenerationStarted(imports=packages) if packages:
            return f"importing {', '.join(packages)}"
        case events.NodesUp() | events.GenerationStarted():
            return "starting the workers"
        case events.WorkersAwaited():
            return f"waiting for {name_ranks(event.ranks)} to start"
        case events.WorkersStarted():
            return "waiting for the workers' first output"
        case events.NodesStopping():
            return "cleaning up"
        case events.GenerationEnded() | events.NodesDown() | events.NodesLeft():
            return ""
    return None


def _hosts(placed: dict[str, str]) -> str:
    """The nodes of each host, if there are several hosts."""
    hosts: dict[str, list[str]] = {}
    for node, host in placed.items():
        hosts.setdefault(host, []).append(node)
    return "; ".join(f"{host}: {', '.join(nodes)}" for host, nodes in sorted(hosts.items()))


def name_ranks(ranks: Sequence[int]) -> str:
    """Format ranks; the first eight are listed."""
    more = f" and {len(ranks) - MAX_RANKS} more" if len(ranks) > MAX_RANKS else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:MAX_RANKS]))}{more}"


def _final(metrics: Iterable[dict[str, Any]]) -> list[tuple[str, Any]]:
    """The last value of every metric, without values that are too large."""
    last = {name: value for values in metrics for name, value in values.items() if plain(value)}
    return [(name, strict(value)) for name, value in last.items()]


def _fitting(values: list[Any], most: int = sys.maxsize) -> tuple[list[Any], bool]:
    """The last `most` values, or as many of them as fit in a list of the report; and whether that is all of them."""
    count, room = 0, MAX_LIST
    for value in reversed(values[-most:]):
        room -= len(json.dumps([[value]], indent=2))  # indented as in the report
        if room < 0:
            break
        count += 1
    return values[len(values) - count :], count == len(values)
