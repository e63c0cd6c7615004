"""From a stored job to its report: run the supervisor, and write the report."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from orchestrate import __version__, patience
from orchestrate.clock import wait_until
from orchestrate.engines.base import Engine, never
from orchestrate.errors import OrchestrateError, UsageError
from orchestrate.files import folder, log_file
from orchestrate.host import claims, records
from orchestrate.plan.plan import Plan
from orchestrate.record import lock, report, run_dir, stacks, usage
from orchestrate.record.events import OURS, Event, GenerationStarted, JobEnded, NodesDown, SupervisorStarted
from orchestrate.record.history import History
from orchestrate.record.outcomes import JobResult, Outcome
from orchestrate.record.paths import JobPaths
from orchestrate.record.recorder import Recorder, boot
from orchestrate.spec.redact import Mask
from orchestrate.spec.spec import JobSpec
from orchestrate.supervise.context import JobContext
from orchestrate.supervise.job_files import REMOVED_AFTER, JobFiles
from orchestrate.supervise.notify import Notifier
from orchestrate.supervise.observer import Observer, SharedUsage
from orchestrate.supervise.open_stores import NoCopies
from orchestrate.supervise.supervisor import Supervisor
from orchestrate.supervise.tensorboard import Board

log = logging.getLogger(__name__)
LOCK_ATTEMPTS = 10  # to lock a cluster, 0.1 s apart
RESERVED = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
RESERVE = 1 << 17  # bytes of the disk for the last events and the report, in case the job fills it


def supervise(
    paths: JobPaths,
    engine: Engine,
    stops: Callable[[], int],
    observer: Observer,
    prepared: float = 0.0,
    evicted: Callable[[], bool] = never,
) -> dict[str, Any]:
    """Run a job from its current state to its end, and return the report.

    `stops()` returns the number of stop requests so far, and `prepared` are the seconds that the command has taken
    before. Raises OrchestrateError if the job could not start, BlockingIOError if another process supervises it, and
    Requeued once its workers have ended after `evicted()` was true: the job has not ended then.
    """
    with contextlib.ExitStack() as stack:
        stack.callback(patience.calm)
        claim = stack.enter_context(claims.Ticket(paths.root.name))
        claim.inherit()  # before the job has a supervisor, which is when the process that has prepared it lets go
        stack.enter_context(lock.held(paths))
        spec, plan = run_dir.load(paths)
        claim.take(claims.needs(plan.engine, plan.gpus, spec.pin))
        stack.enter_context(log_file.kept(paths.orchestrate_log, hide := spec.mask()))
        log.info("orchestrate %s, Python %s, %s", __version__, platform.python_version(), " ".join(os.uname()[::2]))
        seen = _take_cluster(paths, stack) or paths.shared
        notifier = Notifier(spec.on_event, plan.job_id, str(paths.root))
        files = _files(paths, hide, observer, stack)
        with observer.following():

            def save_plan(plan: Plan) -> None:
                run_dir.keep(paths, plan, spec)
                observer.planned(plan)

            emit = recorder(paths, _heard(notifier, observer), hide=hide)
            removed = _check_end(paths, plan, emit) if (ended := _has_ended(paths)) else None
            stack.enter_context(_reserve(paths))
            emit(SupervisorStarted(plan.job_id, round(prepared, 3), boot(), round(emit.clock.monotonic(), 3)))
            job = JobContext(
                spec=spec,
                stored_plan=plan,
                run=seen,
                engine=engine,
                emit=emit,
                stops=stops,
                evicted=evicted,
                files=files,
                without_nodes=ended,
                copies=_copies(spec, paths, stops, emit),
                usage=SharedUsage(paths, observer),
            )
            supervisor = Supervisor(job, save_plan)
            result, failure = (JobResult(Outcome.FAILED, str(removed)), removed) if removed else _result(supervisor)
        data = _end(supervisor, result, hide)
        _finish(job, data, observer.message)
        for text in observer.problems():
            observer.message(f"warning: {text}")
        notifier.close()
    if failure:
        raise failure
    return data


def _files(paths: JobPaths, hide: Mask, observer: Observer, stack: contextlib.ExitStack) -> JobFiles:
    """Return the files of a job, which listen to its output until `stack` exits, as does TensorBoard's board."""
    files = JobFiles(paths, hide, observer.is_behind)
    board = stack.enter_context(Board(paths, hide))
    observer.listeners += [files.heard, board.heard]
    return files


def _heard(notifier: Notifier, observer: Observer) -> Callable[[Event], None]:
    """Return what is called with each event."""

    def hear(event: Event) -> None:
        log.info("%s", event)
        notifier.event(event)
        observer.event(event)
        if isinstance(event, GenerationStarted) and event.generation == 0:
            threading.Thread(target=_load_pages, daemon=True).start()

    return hear


def _has_ended(paths: JobPaths) -> bool:
    """Whether the nodes of a job were removed at its end, and with them their key; on a cluster, it has none."""
    return not paths.cluster and not records.need(paths.root).key


def _check_end(paths: JobPaths, plan: Plan, emit: Recorder) -> OrchestrateError | None:
    """Return why a job without nodes has ended that was moved out of its cluster; None if its outcome is known.

    Raises UsageError for any other whose outcome is not among its events.
    """
    name = paths.root.name
    if History(emit.events).outcome:
        return None
    if plan.placement.cluster:
        what = "while it ran" if emit.events else "before it started"
        return OrchestrateError(f"its cluster was removed {what}", f"python -m orchestrate resume {name}")
    raise UsageError(f"{name} has ended, and how was not recorded", f"its files stay in {paths.root}; run it again")


@contextlib.contextmanager
def _reserve(paths: JobPaths) -> Iterator[None]:
    """Take some space of the disk until the end of the job, if that is possible."""
    with contextlib.suppress(OSError, AttributeError):  # not on every system
        with records.pinned(paths.root) as run:
            file = os.open(run / paths.reserve.name, RESERVED, 0o600)
        try:
            os.posix_fallocate(file, 0, RESERVE)
        finally:
            os.close(file)
    try:
        yield
    finally:
        _free(paths)


def _free(paths: JobPaths) -> None:
    with contextlib.suppress(OSError):
        records.drop(paths.reserve)


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


def _copies(spec: JobSpec, paths: JobPaths, stops: Callable[[], int], emit: Recorder) -> NoCopies:
    """Return the copies of a job's files in object stores."""
    if not spec.checkpoints and not spec.output:
        return NoCopies()
    from orchestrate.supervise.checkpoint_copies import StoreCopies  # only here: it takes time to import

    return StoreCopies(spec, paths, stops, emit)


def _end(supervisor: Supervisor, result: JobResult, hide: Mask) -> dict[str, Any]:
    """Finish the files that workers wrote, record the end, and return the content of report.json without secrets."""
    job, emit, ended = supervisor.job, supervisor.emit, supervisor.history.ended
    files = job.files
    down = isinstance(emit.events[-1], NodesDown)
    work = down and supervisor.plan.placement.has_work
    written = report.Written(files.paths.work, [], False) if work else None
    try:
        written = files.remove_unchanged_copies(supervisor.plan.placement) if down else None
        refused = "" if down else "nodes may still write"
        copies = job.copies.end("its run directory was replaced" if records.replaced(files.paths.root) else refused)
    except patience.Abandoned:
        patience.calm()
        copies = job.copies.end("copying was stopped")
    _free(files.paths)
    emit(JobEnded(result.outcome, result.why))
    emit.close()
    seconds, metrics, checkpoints = emit.events[-1].seconds, hide.inside(files.metrics()), files.checkpoints()
    prepared = sum(event.prepared for event in emit.events if isinstance(event, SupervisorStarted))
    result = dataclasses.replace(result, why=hide(result.why), left=hide(result.left))  # before they are cut
    content = report.report(supervisor.plan, result, ended, seconds, metrics, *checkpoints, written, copies, prepared)
    data: dict[str, Any] = hide.inside(content, ours=OURS)
    return data


def _write_page(paths: JobPaths, data: dict[str, Any]) -> None:
    """Write report.html for the content of report.json; raises OrchestrateError if that fails."""
    from orchestrate.pages import page  # only here: it takes time to import

    page.write([paths], paths.page, data, records.put)


def _make_harmless(paths: JobPaths) -> None:
    """Remove set-user-ID bits from the files of a job; raises OSError."""
    there = paths.folder
    with records.pinned(there.parent) as parent:
        folder.harmless(parent / there.name)


def _load_pages() -> None:
    """Import what `_write_page` needs while the workers run: it takes 50 ms, which an ended job would wait for."""
    from orchestrate.pages import page

    page.prepare()


def _take_cluster(paths: JobPaths, stack: contextlib.ExitStack) -> Path | None:
    """Hold the lock of the job's cluster until `stack` exits; return the folder of its nodes, or None."""
    if not paths.cluster:
        return None
    cluster = JobPaths(paths.root.parent / paths.cluster)
    records.need(cluster.root)
    try:
        _hold(cluster, stack)
    except BlockingIOError:
        hint = f"python -m orchestrate attach {paths.root.name}, once that job has ended"
        raise UsageError(f"{paths.cluster} is in use by another job", hint) from None
    return cluster.nodes


def _hold(cluster: JobPaths, stack: contextlib.ExitStack) -> None:
    """Lock a cluster until `stack` exits: another command may hold the lock for a moment, to look what uses it."""
    for left in reversed(range(LOCK_ATTEMPTS)):
        try:
            stack.enter_context(lock.held(cluster))
            return
        except BlockingIOError:
            if not left:
                raise
        time.sleep(0.1)


def recorder(paths: JobPaths, show_event: Callable[[Event], None] = lambda _: None, *, hide: Mask) -> Recorder:
    """Return the recorder of a job's events; raises UsageError if they are damaged."""
    try:
        key = bytes.fromhex(records.need(paths.root).events)
        return Recorder(paths.events, show_event, lambda line: hide.inside(line, ours=OURS), key)
    except ValueError as error:
        hint = f"python -m orchestrate rm {paths.root.name}"
        raise UsageError(f"{paths.events} is damaged: {error}", hint) from None


def _end_record(paths: JobPaths) -> None:
    """End the record of a job, if its files say how it has ended: otherwise, only a supervisor can find out."""
    if paths.report.exists() or History(run_dir.history(paths)).outcome:
        records.end(paths.root)


def _finish(job: JobContext, data: dict[str, Any], show: Callable[[str], None]) -> None:
    """Write the report and put the job's files in their final state; pass a warning to `show` for each failure."""
    paths = job.files.paths
    there = lambda: not (folder.gone(paths.root) or records.replaced(paths.root))  # noqa: E731
    if not wait_until(there, REMOVED_AFTER, job.clock):
        return show(f"warning: {paths.root} was removed or replaced while the job ran: its report and logs are lost")
    steps: list[Callable[[], object]] = [
        *([paths.folder.make] if job.files.gone() else []),  # a local process can remove its job folder
        # First: the job has ended for others once report.json is there, and they read its files.
        *([] if data["left_behind"] else [lambda: run_dir.move_from_cluster(paths)]),
        lambda: _write_page(paths, data),
        lambda: records.write(paths.report, json.dumps(data, indent=2) + "\n"),
        *([] if paths.cluster and data["left_behind"] else [lambda: _make_harmless(paths)]),
        lambda: usage.remove(paths),
        lambda: stacks.remove(paths),
        job.copies.publish,
    ]
    if not data["left_behind"]:
        steps.append(lambda: _end_record(paths))
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
