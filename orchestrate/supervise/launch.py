"""From a spec to a report: makes the run directory, has the job supervised, writes down what came of it."""

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
LOG_INTERVAL = (0.05, 0.25)  # seconds between two looks at the logs, while workers write and while they are silent
MAX_LOG_READ = 1 << 20  # bytes of each log that one look shows, before our own lines have their turn
MAX_TURN = 1.0  # seconds that it takes at most
LAST_LINES_TIMEOUT = 10.0  # seconds for what workers have written at the end of a job
READER_TIMEOUT = 60.0  # seconds that a reader has for the last lines


def check_script(spec: JobSpec) -> JobSpec:
    """Check that the script is there, below the current folder; return the spec with its path relative to that.

    A name without a slash may also be a program of the image, and so may a path of another folder.
    """
    script = spec.command[0]
    ours = of_python(spec.command)
    if not script:
        raise UsageError("the script has an empty name", "write -- SCRIPT ARGS, or -- -m MODULE ARGS")
    if script.startswith("-"):
        if script != "-m" or len(spec.command) < 2:
            raise UsageError(f"{script} is no script", "write -- SCRIPT ARGS, or -- -m MODULE ARGS")
        module = spec.command[1]
        if module.endswith(".py") and os.path.isfile(module):
            raise UsageError(f"-m takes a module, and {module} is a file", "leave out -m")
        return spec
    try:
        path = Path(script).resolve()
        found = path.is_file()
    except (OSError, RuntimeError, ValueError) as error:  # too long, links in a circle, letters of another locale
        raise UsageError(f"the script {strict_yaml.shown(script)} cannot be read: {error}", "check the path") from None
    below = path.is_relative_to(Path.cwd().resolve())
    if path.is_dir():
        module = ".".join(Path(script).parts) or "PACKAGE"
        raise UsageError(f"the script {script} is a folder", f"to run a module in it: -- -m {module}.MODULE")
    program = not ours and os.access(path, os.X_OK) and (not below or ("/" not in script and shutil.which(script)))
    if program or (not ours and not found and (not below or "/" not in script)):
        _check_shell_script(spec)
        return spec
    if not found:
        raise UsageError(f"the script {script} does not exist", f"paths count from {Path.cwd()}")
    if not below:
        raise UsageError(
            f"the script {script} is outside {Path.cwd()}, the folder that the nodes see",
            f"start from its folder: cd {path.parent}",
        )
    if not ours and not os.access(path, os.X_OK):
        interpreter = "bash" if path.suffix == ".sh" else "python"
        raise UsageError(
            f"{script} is neither a .py file nor executable",
            f"chmod +x {script}, or run it with an interpreter: -- {interpreter} {script}",
        )
    relative = str(path.relative_to(Path.cwd().resolve()))
    # Python would take it for an option, and a program is looked for in PATH where its name has no slash.
    relative = f"./{relative}" if relative.startswith("-") or not ours else relative
    return dataclasses.replace(spec, command=(relative, *spec.command[1:]))


def _check_shell_script(spec: JobSpec) -> None:
    """Raise UsageError if a shell is to run a file of the current folder that does not exist."""
    shell, *words = spec.command
    if Path(shell).name in SHELLS and words and not words[0].startswith(("-", "/")) and not Path(words[0]).exists():
        raise UsageError(f"the script {words[0]} does not exist", f"paths count from {Path.cwd()}")


def supervise(
    paths: JobPaths,
    engine: Engine,
    stops: Callable[[], int],
    show: Callable[[str], None],
    follower: logs.Follower | None = None,
    output: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Carry a job from where it stands to its end; hand each line for a person to `show`; return the report.

    `stops()` is the number of requests to stop so far; `follower` continues where the logs were shown last (default:
    from their beginning), and `output` gets the workers' lines (default: as `show`). Raises OrchestrateError where the
    job could not start, BlockingIOError where another process supervises it.
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

            def tell(event: Event) -> None:
                log.info("%s", event)
                if (now := report.phase(event)) is not None:
                    late = isinstance(event, WorkersStarted)  # a worker may have written before the others started
                    in_turn(lambda: phase(now if follower.silent or not late else ""))
                if said := report.line(event):
                    in_turn(partial(show, said))

            def renew(plan: Plan) -> None:
                store.keep(paths, plan)
                follower.follow(prefixes(plan))

            emit = _recorder(paths, tell, hide)
            emit(SupervisorStarted(plan.job_id))
            files = JobFiles(paths, hide)
            supervisor = Supervisor(spec, plan, seen, engine, emit, stops, files, renew)
            try:
                outcome = supervisor.supervise()
            except OrchestrateError as error:
                log.info("the job could not start or go on", exc_info=True)
                outcome, failure = JobResult(Outcome.FAILED, supervisor.could_not(error)), error
        emit(JobEnded(outcome.word, outcome.why))
        emit.close()
        metrics, ended = hide.inside(files.metrics()), supervisor.history.ended
        told = report.report(supervisor.plan, outcome, ended, emit.events[-1].seconds, metrics, *files.checkpoints())
        data: dict[str, Any] = hide.inside(told, ours=OURS)
        if files.gone():
            show(f"warning: {paths.root} was removed while the job ran: it has neither report nor logs")
        else:
            _finish(paths, data, show)
    if failure:
        raise failure
    return data


def _take_cluster(paths: JobPaths, stack: contextlib.ExitStack) -> Path | None:
    """Hold the lock of the job's cluster until `stack` ends; return the folder that the nodes see, None without one."""
    if not paths.cluster:
        return None
    cluster = JobPaths(paths.root.parent / paths.cluster)
    records.need(cluster.root)
    try:
        stack.enter_context(lock.held(cluster))
    except BlockingIOError:
        again = f"python -m orchestrate attach {paths.root.name}, once that job has ended"
        raise UsageError(f"another job has taken {paths.cluster}", again) from None
    return cluster.nodes


def _recorder(paths: JobPaths, tell: Callable[[Event], None], hide: Mask) -> Recorder:
    try:
        key = bytes.fromhex(records.need(paths.root).events)
        return Recorder(paths.events, tell, lambda line: hide.inside(line, ours=OURS), key)
    except ValueError as error:
        hint = f"python -m orchestrate rm {paths.root.name}"
        raise UsageError(f"{paths.events} is damaged: {error}", hint) from None


def _finish(paths: JobPaths, data: dict[str, Any], show: Callable[[str], None]) -> None:
    """Write the report, and leave the job's files as they stay; `show` warns of what is not possible."""
    acts: list[Callable[[], object]] = [
        lambda: records.write(paths.report, json.dumps(data, indent=2) + "\n"),
        lambda: store.bring_home(paths),
        lambda: folder.harmless(paths.shared),
    ]
    if not data["left_behind"]:
        acts.append(lambda: records.end(paths.root))
    for act in acts:
        try:
            act()
        except OSError as error:  # the job has ended all the same
            show(f"warning: not all files of {paths.root} are as they should be: {error}")


def prefixes(plan: Plan) -> dict[int, str]:
    """What stands before the lines of each rank."""
    return logs.prefixes({worker.rank: worker.node for worker in plan.workers})


def rest(paths: JobPaths, spec: JobSpec, plan: Plan) -> logs.Follower:
    """A follower of the workers' output from its last lines on."""
    follower = logs.Follower(paths, prefixes(plan), hide=Mask(spec.env, spec.secrets))
    follower.skip()
    return follower


@contextmanager
def _following(
    follower: logs.Follower, show: Callable[[str], None], output: Callable[[str], None]
) -> Iterator[Callable[[Callable[[], None]], None]]:
    """Hand the workers' lines to `output` as they come, all of them before the end.

    Yields a function that has something else printed in its turn.

    One thread shows everything: whoever does not read what we print must not stop the supervisor.
    """
    bell, done = threading.Event(), threading.Event()
    waiting: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    left: Iterator[str] = iter(())  # of a look that took too long

    def catch_up(end: bool = False) -> int:
        nonlocal left
        shown = count = waiting.qsize()
        until, fresh = time.monotonic() + MAX_TURN, False
        while True:  # what the workers wrote before we said something
            if (line := next(left, None)) is not None:
                phase("")
                output(line)
                shown += 1
                if time.monotonic() > until:
                    break
            elif fresh:
                break
            else:
                left, fresh = follower.lines(end, MAX_LOG_READ), True
        for _ in range(count):
            waiting.get()()
        if now := follower.progress():
            progress(now, output)
        return shown

    def follow() -> None:
        pause = LOG_INTERVAL[0]
        while not done.is_set():
            bell.wait(pause)
            bell.clear()
            pause = LOG_INTERVAL[0] if catch_up() else min(LOG_INTERVAL[1], 1.5 * pause)
        until = time.monotonic() + LAST_LINES_TIMEOUT
        while catch_up(end=True):
            if time.monotonic() > until:
                return show(f"warning: workers wrote more than can be shown: see {follower.paths.logs}")

    def in_turn(action: Callable[[], None]) -> None:
        waiting.put(action)
        bell.set()  # before the workers of another generation write

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield in_turn
    finally:
        done.set()
        bell.set()
        thread.join(READER_TIMEOUT)
        phase("")
