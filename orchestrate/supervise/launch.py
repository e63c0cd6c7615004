"""From a stored job to its report: check the script, run the supervisor, show the output, write the report."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import platform
import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from orchestrate import __version__
from orchestrate.console import phase, progress
from orchestrate.engines.base import Engine
from orchestrate.errors import OrchestrateError, UsageError
from orchestrate.files import folder, lock, log_file, records
from orchestrate.files.paths import JobPaths
from orchestrate.job import logs, report, store, strict_yaml
from orchestrate.job.events import OURS, Event, JobEnded, SupervisorStarted, WorkersStarted
from orchestrate.job.outcomes import JobResult, Outcome
from orchestrate.job.plan import Plan
from orchestrate.job.recorder import Recorder
from orchestrate.job.redact import Mask
from orchestrate.job.spec import JobSpec
from orchestrate.node.command import of_python
from orchestrate.supervise.job_files import JobFiles
from orchestrate.supervise.supervisor import Supervisor

log = logging.getLogger(__name__)

SHELLS = ("sh", "bash", "zsh")
LOG_INTERVAL = (0.05, 0.25)  # seconds between reads of the logs, while workers write and while they are silent
MAX_LOG_READ = 1 << 20  # bytes of each log per read, before the supervisor's own lines are shown
MAX_SHOW_SECONDS = 1.0  # seconds to show the lines of one read, before the supervisor's own
LAST_LINES_TIMEOUT = 10.0  # seconds to show the remaining output at the end of a job
READER_TIMEOUT = 60.0  # seconds for a slow reader of our output to take the last lines


def check_script(spec: JobSpec) -> JobSpec:
    """Check that the script exists in the current folder; return the spec with a path relative to that folder.

    A name without a slash, or a path outside the folder, may also be a program in the image. Raises UsageError.
    """
    script = spec.command[0]
    is_python = of_python(spec.command)
    if not script:
        raise UsageError("the script name is empty", "use -- SCRIPT ARGS, or -- -m MODULE ARGS")
    if script.startswith("-"):
        if script != "-m" or len(spec.command) < 2:
            raise UsageError(
                f"expected a script or -m MODULE, got {script}", "use -- SCRIPT ARGS, or -- -m MODULE ARGS"
            )
        module = spec.command[1]
        if module.endswith(".py") and os.path.isfile(module):
            raise UsageError(f"-m takes a module, but {module} is a file", "remove -m")
        return spec
    try:
        path = Path(script).resolve()
        found = path.is_file()
    except (OSError, RuntimeError, ValueError) as error:  # too long, a loop of links, or not encodable
        raise UsageError(f"the script {strict_yaml.shown(script)} cannot be read: {error}", "check the path") from None
    inside = path.is_relative_to(Path.cwd().resolve())
    if path.is_dir():
        module = ".".join(Path(script).parts) or "PACKAGE"
        raise UsageError(f"the script {script} is a folder", f"to run a module in it: -- -m {module}.MODULE")
    program = (
        not is_python and os.access(path, os.X_OK) and (not inside or ("/" not in script and shutil.which(script)))
    )
    if program or (not is_python and not found and (not inside or "/" not in script)):
        _check_shell_script(spec)
        return spec
    if not found:
        raise UsageError(f"the script {script} does not exist", f"paths are relative to {Path.cwd()}")
    if not inside:
        raise UsageError(
            f"the script {script} is outside {Path.cwd()}, the folder that nodes see",
            f"run from its folder: cd {path.parent}",
        )
    if not is_python and not os.access(path, os.X_OK):
        interpreter = "bash" if path.suffix == ".sh" else "python"
        raise UsageError(
            f"{script} is neither a .py file nor executable",
            f"chmod +x {script}, or run it with an interpreter: -- {interpreter} {script}",
        )
    relative = str(path.relative_to(Path.cwd().resolve()))
    # Otherwise Python takes it for an option, and a program without a slash is searched in PATH.
    relative = f"./{relative}" if relative.startswith("-") or not is_python else relative
    return dataclasses.replace(spec, command=(relative, *spec.command[1:]))


def _check_shell_script(spec: JobSpec) -> None:
    """Raise UsageError if the command runs a shell with a script that does not exist in the current folder."""
    shell, *words = spec.command
    if Path(shell).name in SHELLS and words and not words[0].startswith(("-", "/")) and not Path(words[0]).exists():
        raise UsageError(f"the script {words[0]} does not exist", f"paths are relative to {Path.cwd()}")


def supervise(
    paths: JobPaths,
    engine: Engine,
    stops: Callable[[], int],
    show: Callable[[str], None],
    follower: logs.Follower | None = None,
    output: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Run a job from its current state to its end, and return the report.

    `stops()` returns the number of stop requests so far. `show` gets messages, `output` gets worker output (default:
    `show`), and `follower` continues where logs were last shown (default: at their start). Raises OrchestrateError if
    the job could not start, and BlockingIOError if another process supervises it.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(lock.held(paths))
        spec, plan = store.load(paths)
        hide = Mask(spec.env, spec.secrets)
        stack.enter_context(log_file.kept(paths.orchestrate_log, hide))
        log.info("orchestrate %s, Python %s, %s", __version__, platform.python_version(), platform.platform())
        seen = _take_cluster(paths, stack) or paths.shared
        follower = follower or logs.Follower(paths, prefixes(plan), hide=hide)
        follower.follow(prefixes(plan))
        follower.marks = False  # the supervisor announces generations itself
        failure = None
        with _following(follower, show, output or show) as in_turn:

            def show_event(event: Event) -> None:
                log.info("%s", event)
                if (text := report.phase(event)) is not None:
                    late = isinstance(event, WorkersStarted)  # a worker may have written before the others started
                    in_turn(lambda: phase(text if follower.silent or not late else ""))
                if message := report.line(event):
                    in_turn(partial(show, message))

            def save_plan(plan: Plan) -> None:
                store.keep(paths, plan)
                follower.follow(prefixes(plan))

            emit = _recorder(paths, show_event, hide)
            emit(SupervisorStarted(plan.job_id))
            files = JobFiles(paths, hide)
            supervisor = Supervisor(spec, plan, seen, engine, emit, stops, files, save_plan)
            try:
                result = supervisor.supervise()
            except OrchestrateError as error:
                log.info("the job could not start or continue", exc_info=True)
                result, failure = JobResult(Outcome.FAILED, supervisor.failure_reason(error)), error
        emit(JobEnded(result.outcome, result.why))
        emit.close()
        metrics, ended = hide.inside(files.metrics()), supervisor.history.ended
        content = report.report(supervisor.plan, result, ended, emit.events[-1].seconds, metrics, *files.checkpoints())
        data: dict[str, Any] = hide.inside(content, ours=OURS)
        if files.gone():
            show(f"warning: {paths.root} was removed while the job ran: its report and logs are lost")
        else:
            _finish(paths, data, show)
    if failure:
        raise failure
    return data


def _take_cluster(paths: JobPaths, stack: contextlib.ExitStack) -> Path | None:
    """Hold the lock of the job's cluster until `stack` exits; return the folder of its nodes, or None."""
    if not paths.cluster:
        return None
    cluster = JobPaths(paths.root.parent / paths.cluster)
    records.need(cluster.root)
    try:
        stack.enter_context(lock.held(cluster))
    except BlockingIOError:
        hint = f"python -m orchestrate attach {paths.root.name}, once that job has ended"
        raise UsageError(f"{paths.cluster} is in use by another job", hint) from None
    return cluster.nodes


def _recorder(paths: JobPaths, show_event: Callable[[Event], None], hide: Mask) -> Recorder:
    try:
        key = bytes.fromhex(records.need(paths.root).events)
        return Recorder(paths.events, show_event, lambda line: hide.inside(line, ours=OURS), key)
    except ValueError as error:
        hint = f"python -m orchestrate rm {paths.root.name}"
        raise UsageError(f"{paths.events} is damaged: {error}", hint) from None


def _finish(paths: JobPaths, data: dict[str, Any], show: Callable[[str], None]) -> None:
    """Write the report and put the job's files in their final state; pass a warning to `show` for each failure."""
    steps: list[Callable[[], object]] = [
        lambda: records.write(paths.report, json.dumps(data, indent=2) + "\n"),
        lambda: store.move_from_cluster(paths),
        lambda: folder.harmless(paths.shared),
    ]
    if not data["left_behind"]:
        steps.append(lambda: records.end(paths.root))
    for step in steps:
        try:
            step()
        except OSError as error:  # does not change the outcome
            show(f"warning: could not finish all files of {paths.root}: {error}")


def prefixes(plan: Plan) -> dict[int, str]:
    """Return the output prefix of each rank."""
    return logs.prefixes({worker.rank: worker.node for worker in plan.workers})


def rest(paths: JobPaths, spec: JobSpec, plan: Plan) -> logs.Follower:
    """Return a follower of worker output, starting with its last lines."""
    follower = logs.Follower(paths, prefixes(plan), hide=Mask(spec.env, spec.secrets))
    follower.skip()
    return follower


@contextmanager
def _following(
    follower: logs.Follower, show: Callable[[str], None], output: Callable[[str], None]
) -> Iterator[Callable[[Callable[[], None]], None]]:
    """Pass worker output to `output` as it arrives, and all of it before the context exits.

    Yields a function that queues other output, to be shown in order. One thread shows everything, so that a reader that
    blocks does not block the supervisor.
    """
    wake, done = threading.Event(), threading.Event()
    queued: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    remaining: Iterator[str] = iter(())  # lines of a read that took too long to show

    def catch_up(end: bool = False) -> int:
        nonlocal remaining
        shown = count = queued.qsize()
        until, fresh = time.monotonic() + MAX_SHOW_SECONDS, False
        while True:  # worker output from before the queued messages
            if (line := next(remaining, None)) is not None:
                phase("")
                output(line)
                shown += 1
                if time.monotonic() > until:
                    break
            elif fresh:
                break
            else:
                remaining, fresh = follower.lines(end, MAX_LOG_READ), True
        for _ in range(count):
            queued.get()()
        if bar := follower.progress():
            progress(bar, output)
        return shown

    def follow() -> None:
        pause = LOG_INTERVAL[0]
        while not done.is_set():
            wake.wait(pause)
            wake.clear()
            pause = LOG_INTERVAL[0] if catch_up() else min(LOG_INTERVAL[1], 1.5 * pause)
        until = time.monotonic() + LAST_LINES_TIMEOUT
        while catch_up(end=True):
            if time.monotonic() > until:
                return show(f"warning: some worker output was not shown: see {follower.paths.logs}")

    def in_turn(action: Callable[[], None]) -> None:
        queued.put(action)
        wake.set()  # show it before the next generation's output

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield in_turn
    finally:
        done.set()
        wake.set()
        thread.join(READER_TIMEOUT)
        phase("")
