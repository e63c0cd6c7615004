"""From a spec to a report: makes the run directory, has the job supervised, writes down what came of it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import queue
import re
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from orchestrate import lock, logs, report
from orchestrate.engines import Engine
from orchestrate.errors import OrchestrateError, UsageError
from orchestrate.events import Event, Recorder, objects
from orchestrate.paths import JobPaths, open_regular, write_whole
from orchestrate.plan import Plan, read_plan
from orchestrate.restarts import Ended
from orchestrate.spec import APP, JobSpec, read_file, resolve
from orchestrate.supervisor import Outcome, Supervisor
from orchestrate.traces import Traces

LOOKS = (0.05, 0.25)  # seconds between two looks at the logs, while workers write and while they are silent
UNREAD = 60.0  # seconds that a reader has for the last lines


def new_id(spec: JobSpec) -> str:
    """A job id such as `mnist-4f2a`: its name, and four random characters."""
    return f"{slug(spec)}-{secrets.token_hex(2)}"


def slug(spec: JobSpec) -> str:
    """The name of a job, as Docker, DNS and file systems take it."""
    name = spec.name or (spec.command[1] if spec.command[0] == "-m" else Path(spec.command[0]).stem)
    name = "digits" if not spec.name and spec.command == APP else name
    return re.sub(r"[^a-z0-9]+", "-", name.lower())[:32].strip("-") or "job"


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


def create(spec: JobSpec, plan: Plan, paths: JobPaths) -> None:
    """Write down what the job is; raises UsageError where its files cannot be written."""
    try:
        if plan.home != plan.job_id:
            inside = JobPaths(paths.root.parent / plan.home / "nodes" / plan.job_id)
            inside.create()
            paths.root.symlink_to(inside.root.relative_to(paths.root.parent))
        else:
            paths.create()
        paths.spec.write_text(spec.to_yaml())
        keep(paths, plan)
    except OSError as error:
        raise UsageError(f"cannot write to {paths.root}: {error.strerror}", "--runs names another folder") from None


def bring_home(paths: JobPaths, inside: Path) -> None:
    """Put the files of a job, which are `inside` the folder of a cluster's nodes, in the place of the link to them."""
    paths.root.unlink(missing_ok=True)
    inside.rename(paths.root)


def remove(paths: JobPaths) -> None:
    """Remove a job's files; raises OrchestrateError where that cannot be."""
    try:
        shutil.rmtree(paths.root)
    except OSError as error:
        raise OrchestrateError(f"{paths.root} cannot be removed: {error}", "see who owns what is in it") from None


def keep(paths: JobPaths, plan: Plan) -> None:
    """Write down the plan of the newest generation."""
    write_whole(paths.plan, plan.to_json() + "\n")


def load(paths: JobPaths) -> tuple[JobSpec, Plan]:
    """Spec and newest plan of a job; raises UsageError where its files are not what they were."""
    try:
        with open_regular(paths.plan) as file:
            return resolve(read_file(paths.spec)), read_plan(file.read().decode())
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise UsageError(f"{paths.root} holds no job that can go on: {error}", "start it again") from None


def supervise(
    paths: JobPaths,
    engine: Engine,
    stops: Callable[[], int],
    show: Callable[[str], None],
    follower: logs.Follower | None = None,
) -> dict[str, Any]:
    """Carry a job from where it stands to its end; hand each line for a person to `show`; return the report.

    `stops()` is the number of requests to stop so far; `follower` continues where the logs were shown last (default:
    from their beginning). Raises OrchestrateError where the job could not start, BlockingIOError where another process
    supervises it.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(lock.held(paths))
        spec, plan = load(paths)
        folder = paths.root
        if plan.home != plan.job_id:
            folder = paths.root.resolve().parent
            try:
                stack.enter_context(lock.held(JobPaths(folder.parent)))
            except BlockingIOError:
                again = f"python -m orchestrate attach {plan.job_id}, once that job has ended"
                raise UsageError(f"another job has taken {folder.parent.name}", again) from None
        follower = follower or logs.Follower(paths, prefixes(plan))
        follower.follow(prefixes(plan))
        follower.marks = False  # the supervisor announces generations itself
        failure = None
        with _following(follower, show) as say:

            def tell(event: Event) -> None:
                if said := report.line(event):
                    say(said)

            def renew(plan: Plan) -> None:
                keep(paths, plan)
                follower.follow(prefixes(plan))

            emit = Recorder(paths.events, tell)
            emit("supervisor_started", job_id=plan.job_id)
            supervisor = Supervisor(spec, plan, folder, engine, emit, stops, Traces(paths), renew)
            try:
                outcome = supervisor.supervise()
            except OrchestrateError as error:
                outcome, failure = Outcome("failed", f"could not start: {error}"), error
        emit("job_ended", outcome=outcome.word, reason=outcome.why)
        emit.close()
        data = _report(supervisor.plan, paths, outcome, supervisor.history.ended, emit.events)
        try:
            write_whole(paths.report, json.dumps(data, indent=2) + "\n")
        except OSError as error:  # the job has ended all the same
            show(f"warning: {paths.report} cannot be written: {error.strerror}")
        if paths.root.is_symlink():
            bring_home(paths, paths.root.resolve())
    if failure:
        raise failure
    return data


def ended(paths: JobPaths) -> dict[str, Any] | None:
    """The report of a job that has ended."""
    try:
        with open_regular(paths.report) as file:
            data = json.loads(file.read())
    except (OSError, ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def _report(
    plan: Plan, paths: JobPaths, outcome: Outcome, ended: list[Ended], events: list[dict[str, Any]]
) -> dict[str, Any]:
    found = (path for path in paths.checkpoints.rglob("*") if path.is_file() and not path.is_symlink())
    # what is hidden, or in a hidden folder, is on its way to be one
    checkpoints = sorted(path for path in found if "/." not in f"/{path.relative_to(paths.checkpoints)}")
    return report.report(plan, outcome, ended, events, objects(paths.metrics), checkpoints)


def prefixes(plan: Plan) -> dict[int, str]:
    """What stands before the lines of each rank."""
    return logs.prefixes({worker.rank: worker.node for worker in plan.workers})


def rest(paths: JobPaths, plan: Plan) -> logs.Follower:
    """A follower of the workers' output from its last lines on."""
    follower = logs.Follower(paths, prefixes(plan))
    follower.skip()
    return follower


@contextmanager
def _following(follower: logs.Follower, show: Callable[[str], None]) -> Iterator[Callable[[str], None]]:
    """Show the workers' output as it comes, all of it before the end; yields what shows a line of our own.

    One thread shows everything: whoever does not read what we print must not stop the supervisor.
    """
    done = threading.Event()
    said: queue.SimpleQueue[str] = queue.SimpleQueue()

    def catch_up(end: bool = False) -> int:
        shown = count = said.qsize()
        for line in follower.lines(end):  # what the workers wrote before we said something
            show(line)
            shown += 1
        for _ in range(count):
            show(said.get())
        return shown

    def follow() -> None:
        pause = LOOKS[0]
        while not done.wait(pause):
            pause = LOOKS[0] if catch_up() else min(LOOKS[1], 1.5 * pause)
        catch_up(end=True)

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield said.put
    finally:
        done.set()
        thread.join(UNREAD)
