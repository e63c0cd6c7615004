"""From a spec to a report: makes the run directory, runs the job on an engine, writes down what came of it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from orchestrate import lock, logs
from orchestrate.engines import Engine
from orchestrate.errors import OrchestrateError, UsageError
from orchestrate.events import Recorder
from orchestrate.paths import JobPaths, open_regular, write_whole
from orchestrate.plan import Plan
from orchestrate.report import report
from orchestrate.spec import APP, JobSpec
from orchestrate.supervisor import Outcome, supervise

# How gloo, NCCL and the store say that a peer has gone.
COMPLAINT = re.compile("onnection (closed|reset|refused)|remote process exited|Broken pipe|DistNetworkError")
TAIL = 12  # lines of the first worker that failed which a person sees


def new_id(spec: JobSpec) -> str:
    """A job id such as `mnist-4f2a`: a name that Docker, DNS and file systems take, and four random characters."""
    name = spec.name or (spec.command[1] if spec.command[0] == "-m" else Path(spec.command[0]).stem)
    name = "digits" if not spec.name and spec.command == APP else name
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower())[:32].strip("-")
    return f"{slug or 'job'}-{secrets.token_hex(2)}"


def check_script(spec: JobSpec) -> JobSpec:
    """Check that the script is there, below the current folder; return the spec with its path relative to that."""
    script = spec.command[0]
    if script.startswith("-"):
        if script != "-m" or len(spec.command) < 2:
            raise UsageError(f"{script} is no script", "write -- SCRIPT ARGS, or -- -m MODULE ARGS")
        return spec
    path = Path(script).resolve()
    if not path.is_file():
        kind = "is a folder" if path.is_dir() else "does not exist"
        raise UsageError(f"the script {script} {kind}", f"paths count from {Path.cwd()}")
    try:
        relative = path.relative_to(Path.cwd().resolve())
    except ValueError:
        raise UsageError(
            f"the script {script} is outside {Path.cwd()}, the folder that the nodes see",
            f"start from its folder: cd {path.parent}",
        ) from None
    return dataclasses.replace(spec, command=(str(relative), *spec.command[1:]))


def run(
    spec: JobSpec,
    plan: Plan,
    paths: JobPaths,
    engine: Engine,
    stops: Callable[[], int],
    show: Callable[[str], None],
) -> dict[str, Any]:
    """Run the job, handing each line of worker output to `show`; return the report.

    `stops()` is how often somebody has asked the job to stop. Raises OrchestrateError where the job could not start.
    """
    paths.spec.write_text(spec.to_yaml())
    paths.plan.write_text(plan.to_json() + "\n")
    emit = Recorder(paths.events)
    emit("job_started", job_id=plan.job_id)
    failure = None
    with lock.held(paths), _following(paths, plan, show):
        try:
            outcome = supervise(spec, plan, paths.root, engine, emit, stops, lambda rank: _complains(paths, rank))
        except OrchestrateError as error:
            outcome, failure = Outcome("failed", f"could not start: {error}"), error
        emit("job_ended", outcome=outcome.word, reason=outcome.why)
        emit.close()
        data = _report(plan, paths, outcome, emit.events)
        write_whole(paths.report, json.dumps(data, indent=2) + "\n")
    if failure:
        raise failure
    return data


def _complains(paths: JobPaths, rank: int) -> bool:
    return bool(COMPLAINT.search("\n".join(logs.tail(paths.log(rank), 3))))


def _report(plan: Plan, paths: JobPaths, outcome: Outcome, events: list[dict[str, Any]]) -> dict[str, Any]:
    log = paths.log(outcome.root.rank) if outcome.root else None
    metrics: list[str] = []
    with contextlib.suppress(OSError), open_regular(paths.metrics) as file:
        metrics = file.read().decode(errors="replace").splitlines()
    checkpoints = sorted(path for path in paths.checkpoints.rglob("[!.]*") if path.is_file() and not path.is_symlink())
    return report(plan, outcome, events, metrics, checkpoints, logs.tail(log, TAIL) if log else [], log)


@contextmanager
def _following(paths: JobPaths, plan: Plan, show: Callable[[str], None]) -> Iterator[None]:
    """Show the workers' output as it comes, all of it before the end."""
    follower = logs.Follower(paths, logs.prefixes({worker.rank: worker.node for worker in plan.workers}))
    done = threading.Event()

    def follow() -> None:
        while not done.wait(0.05):
            for line in follower.lines():
                show(line)

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        for line in follower.lines(end=True):
            show(line)
