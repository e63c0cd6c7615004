"""From a stored job to its report: check the script, run the supervisor, show the output, write the report."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import platform
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from orchestrate import __version__, patience
from orchestrate.engines.base import Engine
from orchestrate.errors import OrchestrateError, UsageError
from orchestrate.files import folder, log_file
from orchestrate.host import records
from orchestrate.node.command import of_python
from orchestrate.plan.plan import Plan
from orchestrate.record import lock, report, run_dir, usage
from orchestrate.record.events import OURS, Event, JobEnded, NodesDown, SupervisorStarted
from orchestrate.record.logs import Follower
from orchestrate.record.outcomes import JobResult, Outcome
from orchestrate.record.paths import JobPaths
from orchestrate.record.progress import Reader
from orchestrate.record.recorder import Recorder
from orchestrate.record.times import TimesWriter
from orchestrate.show.screen import Shown
from orchestrate.spec import command, strict_yaml
from orchestrate.spec.redact import Mask
from orchestrate.spec.spec import JobSpec
from orchestrate.supervise.job_files import JobFiles
from orchestrate.supervise.notify import Notifier
from orchestrate.supervise.output import Output, Usage, listen
from orchestrate.supervise.stores import Stores
from orchestrate.supervise.supervisor import Supervisor
from orchestrate.supervise.tensorboard import Board

log = logging.getLogger(__name__)

SHELLS = ("sh", "bash", "zsh")
LAST_OUTPUT = 4096  # bytes of earlier output of each rank that `attach` shows


def check_script(spec: JobSpec) -> JobSpec:
    """Check that the script exists; return the spec with a path relative to the folder in which workers start.

    A name without a slash, or a path outside the folder, may also be a program in the image. Raises UsageError.
    """
    top, script = Path.cwd().resolve(), spec.command[0]
    here = _start(spec.chdir, top)
    spec = dataclasses.replace(spec, chdir=str(here.relative_to(top)) if here != top else "")
    is_python = of_python(spec.command)
    if not script:
        raise UsageError("the script name is empty", "use -- SCRIPT ARGS, or -- -m MODULE ARGS")
    if launcher := command.other_launcher(spec.command):
        raise UsageError(
            f"{launcher} starts workers of its own, which know nothing of the other nodes",
            "leave it out: python -m orchestrate run SCRIPT.py ARGS",
        )
    if script.startswith("-"):
        if script != "-m" or len(spec.command) < 2:
            raise UsageError(
                f"expected a script or -m MODULE, got {script}", "use -- SCRIPT ARGS, or -- -m MODULE ARGS"
            )
        module = spec.command[1]
        if module.endswith(".py") and os.path.isfile(here / module):
            raise UsageError(f"-m takes a module, but {module} is a file", "remove -m")
        return spec
    try:
        given = here / script
        path = given.resolve()
        found = path.is_file()
        path = given.parent.resolve() / given.name if given.name else path  # a link stays one
    except (OSError, RuntimeError, ValueError) as error:  # too long, a loop of links, or not encodable
        raise UsageError(f"the script {strict_yaml.shown(script)} cannot be read: {error}", "check the path") from None
    inside = path.is_relative_to(top)
    if path.is_dir():
        module = ".".join(Path(script).parts) or "PACKAGE"
        raise UsageError(f"the script {script} is a folder", f"to run a module in it: -- -m {module}.MODULE")
    program = (
        not is_python and os.access(path, os.X_OK) and (not inside or ("/" not in script and shutil.which(script)))
    )
    if program or (not is_python and not found and (not inside or "/" not in script)):
        _check_program(spec, here)
        return spec
    if not found:
        raise UsageError(f"the script {script} does not exist", f"paths are relative to {here}")
    if not inside:
        raise UsageError(
            f"the script {script} is outside {top}, the folder that nodes see",
            f"run from its folder: cd {path.parent}",
        )
    if not is_python and not os.access(path, os.X_OK):
        interpreter = "bash" if path.suffix == ".sh" else "python"
        raise UsageError(
            f"{script} is neither a .py file nor executable",
            f"chmod +x {script}, or run it with an interpreter: -- {interpreter} {script}",
        )
    relative = os.path.relpath(path, here)
    # Otherwise Python takes it for an option, and a program without a slash is searched in PATH.
    relative = f"./{relative}" if relative.startswith("-") or not is_python else relative
    return dataclasses.replace(spec, command=(relative, *spec.command[1:]))


def _start(chdir: str, top: Path) -> Path:
    """Return the folder in the code folder `top` in which workers start; raises UsageError."""
    with contextlib.suppress(OSError, RuntimeError, ValueError):  # a loop of links, or not encodable
        start = (top / chdir).resolve()
        if start.is_dir() and start.is_relative_to(top):
            return start
    raise UsageError(f"chdir: {strict_yaml.shown(chdir)} is no folder in {top}", "use a path relative to that folder")


def _check_program(spec: JobSpec, here: Path) -> None:
    """Raise UsageError for a shell with a script that does not exist, and for a script without its suffix."""
    shell, *words = spec.command
    if (here / f"{shell}.py").is_file() and not shutil.which(shell):
        raise UsageError(f"the script {shell} does not exist", f"did you mean {shell}.py?")
    if Path(shell).name in SHELLS and words and not words[0].startswith(("-", "/")) and not (here / words[0]).exists():
        raise UsageError(f"the script {words[0]} does not exist", f"paths are relative to {here}")


def supervise(
    paths: JobPaths,
    engine: Engine,
    stops: Callable[[], int],
    shown: Shown,
    follower: Follower | None = None,
    prepared: float = 0.0,
) -> dict[str, Any]:
    """Run a job from its current state to its end, and return the report.

    `stops()` returns the number of stop requests so far. `follower` continues where logs were last shown (default: at
    their start), and `prepared` are the seconds that the command has taken before. Raises OrchestrateError if the job
    could not start, and BlockingIOError if another process supervises it.
    """
    with contextlib.ExitStack() as stack:
        stack.callback(patience.calm)
        stack.enter_context(lock.held(paths))
        spec, plan = run_dir.load(paths)
        hide = spec.mask()
        stack.enter_context(log_file.kept(paths.orchestrate_log, hide))
        log.info("orchestrate %s, Python %s, %s", __version__, platform.python_version(), platform.platform())
        seen = _take_cluster(paths, stack) or paths.shared
        follower, files = follower or rest(paths, spec, plan, None), JobFiles(paths, hide)
        board, reader = stack.enter_context(Board(paths, hide)), Reader(spec.metrics)
        refresh = listen(follower, reader, shown.screen, files.heard, board.heard)
        output = Output(follower, plan, shown, TimesWriter(paths.times), refresh)
        notifier = Notifier(spec.on_event, plan.job_id, str(paths.root))
        with output.following():

            def show_event(event: Event) -> None:
                log.info("%s", event)
                notifier.event(event)
                output.event(event)

            def save_plan(plan: Plan) -> None:
                run_dir.keep(paths, plan, spec)
                output.printing.planned(plan)
                output.in_turn(partial(shown.screen.planned, plan))

            emit = recorder(paths, show_event, hide=hide)
            emit(SupervisorStarted(plan.job_id, prepared=round(prepared, 3)))
            stores = _stores(spec, paths, stops, emit)
            supervisor = Supervisor(
                spec, plan, seen, engine, emit, stops, files, save_plan, stores, Usage(paths, shown.screen)
            )
            result, failure = _result(supervisor)
        data = _end(supervisor, result, files, stores, hide)
        _finish(files, data, stores, shown.message)
        for text in reader.problems():
            shown.message(f"warning: {text}")
        notifier.close()
    if failure:
        raise failure
    return data


def _result(supervisor: Supervisor) -> tuple[JobResult, OrchestrateError | None]:
    """Run the job to its end; return its result, and the error if it could not start or continue."""
    try:
        return supervisor.supervise(), None
    except OrchestrateError as error:
        log.info("the job could not start or continue", exc_info=True)
        return JobResult(Outcome.FAILED, supervisor.failure_reason(error)), error
    except patience.Abandoned:
        patience.calm()
        return supervisor.abandon(), None


def _stores(spec: JobSpec, paths: JobPaths, stops: Callable[[], int], emit: Recorder) -> Stores:
    """Return the object stores of a job."""
    if not spec.checkpoints and not spec.output:
        return Stores()
    from orchestrate.supervise.stored import Stored  # only here: it takes time to import

    return Stored(spec, paths, stops, emit)


def _end(supervisor: Supervisor, result: JobResult, files: JobFiles, stores: Stores, hide: Mask) -> dict[str, Any]:
    """Finish the files that workers wrote, record the end, and return the content of report.json without secrets."""
    emit, ended = supervisor.emit, supervisor.history.ended
    down = isinstance(emit.events[-1], NodesDown)
    work = down and supervisor.plan.placement.has_work
    written = report.Written(files.paths.work, [], False) if work else None
    try:
        written = files.tidy(supervisor.plan.placement) if down else None
        copies = stores.end("" if down else "nodes may still write")
    except patience.Abandoned:
        patience.calm()
        copies = stores.end("copying was stopped")
    emit(JobEnded(result.outcome, result.why))
    emit.close()
    seconds, metrics, checkpoints = emit.events[-1].seconds, hide.inside(files.metrics()), files.checkpoints()
    prepared = sum(event.prepared for event in emit.events if isinstance(event, SupervisorStarted))
    content = report.report(supervisor.plan, result, ended, seconds, metrics, *checkpoints, written, copies, prepared)
    data: dict[str, Any] = hide.inside(content, ours=OURS)
    return data


def _write_page(paths: JobPaths, data: dict[str, Any]) -> None:
    """Write report.html for the content of report.json; raises OrchestrateError if that fails."""
    from orchestrate.pages import page  # only here: it takes time to import

    page.write([paths], paths.page, data)


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


def recorder(paths: JobPaths, show_event: Callable[[Event], None] = lambda _: None, *, hide: Mask) -> Recorder:
    """Return the recorder of a job's events; raises UsageError if they are damaged."""
    try:
        key = bytes.fromhex(records.need(paths.root).events)
        return Recorder(paths.events, show_event, lambda line: hide.inside(line, ours=OURS), key)
    except ValueError as error:
        hint = f"python -m orchestrate rm {paths.root.name}"
        raise UsageError(f"{paths.events} is damaged: {error}", hint) from None


def _finish(files: JobFiles, data: dict[str, Any], stores: Stores, show: Callable[[str], None]) -> None:
    """Write the report and put the job's files in their final state; pass a warning to `show` for each failure."""
    paths = files.paths
    if files.gone():
        return show(f"warning: {paths.root} was removed while the job ran: its report and logs are lost")
    steps: list[Callable[[], object]] = [
        lambda: _write_page(paths, data),  # first: the job has ended for others once report.json is there
        lambda: records.write(paths.report, json.dumps(data, indent=2) + "\n"),
        lambda: run_dir.move_from_cluster(paths),
        lambda: folder.harmless(paths.shared),
        lambda: usage.remove(paths),
        stores.publish,
    ]
    if not data["left_behind"]:
        steps.append(lambda: records.end(paths.root))
    for step in steps:
        try:
            step()
        except (OSError, OrchestrateError) as error:  # does not change the outcome
            show(f"warning: could not finish all files of {paths.root}: {error}")
        except patience.Abandoned:
            patience.calm()
            show(f"warning: could not finish all files of {paths.root} in time")
    if not paths.report.exists():
        show(f"hint: python -m orchestrate attach {paths.root.name} writes the report once that is possible")


def rest(paths: JobPaths, spec: JobSpec, plan: Plan, last: int | None = LAST_OUTPUT) -> Follower:
    """Return a follower of worker output, starting with its last lines: at most `last` bytes for each rank, or all."""
    follower = Follower(paths, [worker.rank for worker in plan.workers], hide=spec.mask())
    if last is not None:
        follower.skip(last)
    return follower
