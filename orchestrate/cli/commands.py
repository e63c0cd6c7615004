"""Commands for existing jobs and clusters, and helpers that all commands share."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn

from orchestrate import console, errors
from orchestrate.cli import cluster
from orchestrate.cli.find import find
from orchestrate.console import out, print_message, stream
from orchestrate.engines import choice
from orchestrate.engines.choice import sdk
from orchestrate.errors import OrchestrateError, UsageError
from orchestrate.files import lock, records
from orchestrate.files.paths import JobPaths
from orchestrate.job import owners, store
from orchestrate.job.outcomes import Outcome
from orchestrate.job.report import text
from orchestrate.job.spec import JobSpec
from orchestrate.supervise import launch
from orchestrate.supervise.generation import BY_MAX_RUN
from orchestrate.view.screen import Shown

EXIT_CODES = {Outcome.SUCCEEDED: errors.SUCCEEDED, Outcome.FAILED: errors.FAILED, Outcome.LOST: errors.LOST}
MAX_STOP_ATTEMPTS = 20  # attempts, 0.1 s apart, to verify the supervisor that holds a lock: it may be starting

if TYPE_CHECKING:
    from orchestrate.doctor.findings import Finding
    from orchestrate.engines.base import Engine
    from orchestrate.job.plan import Plan


def exit_code(data: dict[str, Any]) -> int:
    """Return the exit code of a command for a job with this report."""
    if data["outcome"] == Outcome.STOPPED:
        return errors.TIMED_OUT if data["reason"] == BY_MAX_RUN else errors.INTERRUPTED
    return EXIT_CODES[data["outcome"]]


def end(args: argparse.Namespace, name: str, data: dict[str, Any]) -> int:
    """Print the report of a job, and return the exit code."""
    print_message(text(data))
    if data["outcome"] != Outcome.SUCCEEDED and data.get("checkpoints") and not data.get("left_behind"):
        print_message(f"hint: python -m orchestrate resume {args.shown / name} continues from its last checkpoint")
    print_message(args.shown / name)
    if args.print_path:
        stream(args.shown / name)
    if args.json:
        stream(json.dumps({"run_directory": str(args.shown / name), **data}, indent=2))
    return exit_code(data)


def count_signals(spec: JobSpec) -> Any:
    """Count Ctrl-C and SIGTERM as requests to stop, and ignore SIGHUP; return a function that returns the count."""
    seen: list[int] = []

    def note(number: int, _: object) -> None:
        seen.append(number)
        first = f"stopping: workers have {spec.grace:g} s to exit; press Ctrl-C again to kill them"
        console.print_later(first if len(seen) == 1 else "killing the workers")

    threading.Thread(target=console.print_queued, daemon=True).start()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, note)
    signal.signal(signal.SIGHUP, lambda *_: None)
    return lambda: len(seen)


def _findings(spec: JobSpec) -> Iterator[Finding]:
    if spec.engine == "process":
        from orchestrate.doctor.findings import local

        yield from local()
        return
    with sdk():
        from orchestrate.doctor import checks
    yield from checks.doctor(spec)


def doctor(spec: JobSpec) -> int:
    """Print problems that keep jobs from running; return the exit code of the first error."""
    from orchestrate.doctor import findings  # only here: its XML parser takes milliseconds to import

    code = errors.SUCCEEDED
    for finding in _findings(spec):
        out(f"{finding.state:<7}  {finding.what}")
        if finding.hint:
            out(f"         hint: {finding.hint}")
        console.flush()
        if finding.state == findings.BAD:
            code = code or finding.code
    return code


def down(args: argparse.Namespace) -> int:
    """Remove a cluster."""
    matches = [each for each in cluster.found(args.runs) if each.name.startswith(args.cluster)]
    if not matches and (lost := _lost_nodes(args.cluster)):
        return _remove_lost(args, lost)
    if len(matches) != 1:
        known = ", ".join(each.name for each in matches or cluster.found(args.runs))
        what = f"{args.cluster} matches {len(matches)} clusters" if matches else f"no such cluster: {args.cluster}"
        raise UsageError(what, f"clusters in {args.shown}: {known}" if known else f"no clusters in {args.shown}")
    chosen = matches[0]
    name, engine = chosen.name, engine_of(chosen.spec, chosen.plan)
    resources = _resources([engine], name)
    if args.dry_run:
        for resource in [resource for _, resource in resources] + [f"folder {chosen.paths.root}"]:
            out(resource)
        return errors.SUCCEEDED
    if user := chosen.user():
        job = chosen.busy_with()
        raise UsageError(f"{name} is in use by {user}", f"python -m orchestrate {f'stop {job}' if job else 'ps'}")
    cluster.take_down(engine, chosen, grace=30)
    print_message(f"{name} removed")
    return errors.SUCCEEDED


def _lost_nodes(name: str) -> list[tuple[Engine, str]]:
    """Return the resources of a cluster whose files are gone, for example because its project was moved."""
    engines = choice.available_engines()
    states = [state for engine in engines for state in engine.jobs() if state.job_id == name]
    lost = any(state.cluster and state.named and not os.path.lexists(state.paths.root) for state in states)
    return _resources(engines, name) if lost else []


def _remove_lost(args: argparse.Namespace, resources: list[tuple[Engine, str]]) -> int:
    if args.dry_run:
        for _, resource in resources:
            out(resource)
        return errors.SUCCEEDED
    for engine in {id(engine): engine for engine, _ in resources}.values():
        engine.remove(args.cluster, grace=30)
    print_message(f"{args.cluster} removed; its files were already gone")
    return errors.SUCCEEDED


def paths_of(args: argparse.Namespace) -> JobPaths:
    """Return the files of the job that `args.job` names; ask the engines only if `--runs` does not have it."""
    folder = args.runs / args.job
    local = folder.joinpath("plan.json").exists() and not owners.foreign(folder) and records.find(folder)
    return JobPaths(find(args, [] if local else choice.available_engines()))


@contextlib.contextmanager
def watching(name: str) -> Iterator[None]:
    """Exit on Ctrl-C with a message that the job continues."""
    try:
        yield
    except KeyboardInterrupt:
        print_message(f"detached; {name} is still running")
        raise SystemExit(errors.INTERRUPTED) from None


def rounds(args: argparse.Namespace, paths: JobPaths) -> Iterator[bool]:
    """Yield once, or with `--follow` at intervals until the job has ended: whether there is another round."""
    while True:
        running = bool(args.follow and not store.ended(paths) and lock.holder(paths))
        yield running
        if not running:
            return
        console.flush()
        time.sleep(0.1)


def wait(args: argparse.Namespace) -> int:
    """Wait until a job ends, and return its exit code."""
    paths = paths_of(args)
    with watching(paths.root.name):
        while not (data := store.ended(paths)):
            if not lock.holder(paths) and not store.ended(paths):
                unsupervised(paths)
            time.sleep(0.1)
    return exit_code(data)


def unsupervised(paths: JobPaths) -> NoReturn:
    """Raise OrchestrateError for a job without a supervisor, since no result will be reported."""
    name = paths.root.name
    raise OrchestrateError(
        f"{name} has no supervisor, so no result will be reported", f"python -m orchestrate attach {name}"
    )


def stop(args: argparse.Namespace) -> int:
    """Stop a job, and verify that nothing of it is left."""
    paths, engines = _find_anywhere(args)
    name = paths.root.name
    if os.path.lexists(paths.root):
        records.need(paths.root)
    resources = _resources(engines, name)
    if args.dry_run:
        for _, resource in resources:
            out(resource)
        return errors.SUCCEEDED
    if store.ended(paths) and not resources and not lock.holder(paths):
        print_message(f"{name} has already ended")
        return errors.SUCCEEDED
    _ask_to_stop(paths)
    resources = _resources(engines, name)
    if resources or not store.ended(paths):
        print_message(f"{name} has no supervisor: removing its nodes")
        _stop_unsupervised(paths, resources)
    left = [resource for _, resource in _resources(engines, name)]
    if left:
        raise OrchestrateError(f"could not remove {', '.join(left)} of {name}", f"python -m orchestrate stop {name}")
    print_message(f"{name} stopped")
    return errors.SUCCEEDED


def _ask_to_stop(paths: JobPaths) -> None:
    """Ask a job's supervisor to stop it, and return once it has no supervisor."""
    attempts = 0
    while supervisor := lock.holder(paths):
        print_message(f"asking the supervisor of {paths.root.name} to stop")
        if not supervisor.ask_to_stop():  # it is just starting or exiting
            attempts += 1
            if attempts > MAX_STOP_ATTEMPTS:
                raise OrchestrateError(
                    f"{paths.lock} is locked by a process that cannot be verified as its supervisor",
                    "run stop where the job was started: in the same container, as the same user",
                )
            time.sleep(0.1)
            continue
        while lock.holder(paths) == supervisor:
            time.sleep(0.1)


def engine_of(spec: JobSpec, plan: Plan) -> Engine:
    """Return the engine in a job's plan; its spec may be `auto`."""
    return choice.select_engine(dataclasses.replace(spec, engine=plan.engine))


def _find_anywhere(args: argparse.Namespace) -> tuple[JobPaths, list[Engine]]:
    """Return a job's files and all engines that answer; raises OrchestrateError if the job's own does not."""
    engines = choice.available_engines()
    paths = JobPaths(find(args, engines))
    with contextlib.suppress(UsageError):  # its files are unreadable
        spec, plan = store.load(paths)
        if plan.engine not in {engine.name for engine in engines}:
            return paths, [engine_of(spec, plan), *engines]
    return paths, engines


def _stop_unsupervised(paths: JobPaths, resources: list[tuple[Engine, str]]) -> None:
    """Stop a job whose supervisor is gone, and write its report; remove its nodes if that fails.

    Raises OrchestrateError if nodes still have files that cannot be copied to the run directory.
    """
    try:
        spec, plan = store.load(paths)
        engine = engine_of(spec, plan)
        more = count_signals(spec)
        follower = launch.rest(paths, spec, plan)
        data = launch.supervise(paths, engine, lambda: 1 + more(), Shown(print_message), follower)
    except (OrchestrateError, BlockingIOError):
        return _remove(paths, resources)
    if why := data["left_behind"]:
        name = paths.root.name
        hint = (
            f"fix the problem and run stop again, or remove the job and all its files: python -m orchestrate rm {name}"
        )
        raise OrchestrateError(f"could not remove all nodes of {name}: {why}", hint)


def _remove(paths: JobPaths, resources: list[tuple[Engine, str]]) -> None:
    for engine in {id(engine): engine for engine, _ in resources}.values():
        engine.remove(paths.root.name, grace=30)
    records.end(paths.root)


def rm(args: argparse.Namespace) -> int:
    """Remove a job's files and resources; for a run directory without a record, only the files."""
    paths, engines = _find_anywhere(args)
    name = paths.root.name
    ours = not os.path.lexists(paths.root) or records.find(paths.root)
    resources = _resources(engines, name) if ours else []
    if supervisor := lock.holder(paths):
        raise UsageError(f"{name} is running, supervised by {supervisor}", f"python -m orchestrate stop {name}")
    if ours and paths.cluster:
        raise UsageError(f"{name} may still be running on a cluster", f"python -m orchestrate stop {name}")
    if args.dry_run:
        for resource in [resource for _, resource in resources] + [f"folder {paths.root}"]:
            out(resource)
        return errors.SUCCEEDED
    if ours:
        _remove(paths, resources)
    store.remove(paths)
    print_message(f"{name} removed")
    return errors.SUCCEEDED


def _resources(engines: list[Engine], name: str) -> list[tuple[Engine, str]]:
    """Return all resources of a job, each with its engine; raises UsageError for another user's job."""
    for engine in engines:
        for state in engine.jobs():
            if state.job_id == name and state.owner not in (os.getuid(), -1):
                raise UsageError(f"{name} belongs to user {state.owner}", "ask them to stop it")
    return [(engine, resource) for engine in engines for resource in engine.resources(name)]


def print_schema(args: argparse.Namespace) -> int:
    """Print the JSON Schema of job files."""
    from orchestrate.job.schema import schema

    out(json.dumps(schema(), indent=2, ensure_ascii=False))
    return errors.SUCCEEDED


BY_NAME = {
    "schema": print_schema,
    "down": down,
    "wait": wait,
    "stop": stop,
    "rm": rm,
}
