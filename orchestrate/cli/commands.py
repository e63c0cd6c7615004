"""The commands for jobs that there are, and what all commands share."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

from orchestrate import console, errors
from orchestrate.cli import cluster, older
from orchestrate.cli.find import find, job_folders
from orchestrate.console import out, say, stream
from orchestrate.engines import choice
from orchestrate.engines.choice import sdk
from orchestrate.errors import OrchestrateError, UsageError
from orchestrate.files import lock, records
from orchestrate.files.paths import JobPaths
from orchestrate.job import logs, owners, store
from orchestrate.job.outcomes import Outcome
from orchestrate.job.redact import Mask
from orchestrate.job.report import text
from orchestrate.job.spec import JobSpec
from orchestrate.supervise import launch
from orchestrate.supervise.generation import BY_MAX_RUN

EXIT_CODES = {Outcome.SUCCEEDED: errors.SUCCEEDED, Outcome.FAILED: errors.FAILED, Outcome.LOST: errors.LOST}
MAX_PROOFS = 20  # times that a supervisor may not be proven to be one, a tenth of a second apart: it may be beginning

if TYPE_CHECKING:
    from orchestrate.doctor.findings import Finding
    from orchestrate.engines.base import Engine
    from orchestrate.job.plan import Plan


def exit_code(data: dict[str, Any]) -> int:
    """What a process that ran this job ends with."""
    if data["outcome"] == Outcome.STOPPED:
        return errors.TIMED_OUT if data["reason"] == BY_MAX_RUN else errors.INTERRUPTED
    return EXIT_CODES[data["outcome"]]


def output(args: argparse.Namespace) -> Callable[[str], None]:
    """What prints the workers' lines: to stdout, unless that is for something else."""
    return say if args.print_path or args.json else stream


def end(args: argparse.Namespace, name: str, data: dict[str, Any]) -> int:
    """Tell how a job has ended, and return the exit code for that."""
    say(text(data))
    say(args.shown / name)
    if args.print_path:
        stream(args.shown / name)
    if args.json:
        stream(json.dumps({"run_directory": str(args.shown / name), **data}, indent=2))
    return exit_code(data)


def count_signals(spec: JobSpec) -> Any:
    """Take Ctrl-C and SIGTERM as requests to stop, and no notice of SIGHUP; return what counts the requests."""
    seen: list[int] = []
    messages: queue.SimpleQueue[str] = queue.SimpleQueue()  # safe in a signal handler, unlike printing

    def note(number: int, _: object) -> None:
        seen.append(number)
        first = f"stopping: the workers have {spec.grace:g} s to end; Ctrl-C again kills them"
        messages.put(first if len(seen) == 1 else "killing the workers")

    def show() -> None:
        while True:
            say(messages.get())

    threading.Thread(target=show, daemon=True).start()
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
    """What keeps jobs from running here."""
    from orchestrate.doctor import findings  # not for other commands: a parser of XML takes them some milliseconds

    worst = errors.SUCCEEDED
    for finding in _findings(spec):
        out(f"{finding.state:<7}  {finding.what}")
        if finding.hint:
            out(f"         hint: {finding.hint}")
        console.flush()
        if finding.state == findings.BAD:
            worst = worst or finding.code
    return worst


def ps(args: argparse.Namespace) -> int:
    """The jobs that have nodes or use those of a cluster, and those whose supervisor has none yet, or none any more."""
    rows = [("NAME", "ENGINE", "NODES", "STATE", "RUN")]

    def add(paths: JobPaths, state: str) -> None:
        with contextlib.suppress(UsageError):  # its files say nothing any more
            plan = store.load(paths)[1]
            nodes = len(plan.nodes) if plan.placement.cluster else 0
            rows.append((plan.job_id, plan.engine, str(nodes), state, str(paths.root)))

    for engine in choice.answering():
        for state in engine.jobs():
            busy = lock.holder(state.paths)
            word = ("in use" if busy else "idle") if state.cluster else "running" if busy else "without supervisor"
            rows.append((state.job_id, state.engine, str(state.nodes), word, str(state.paths.root)))
            for paths in store.on_cluster(state.paths.root.parent, state.job_id) if state.cluster and busy else ():
                if lock.holder(paths):
                    add(paths, f"running on {state.job_id}")
    shown = {name for name, *_ in rows}
    for folder in job_folders(args.runs):
        if folder.name not in shown and lock.holder(JobPaths(folder)):
            add(JobPaths(folder), "running")
    console.table(rows)
    return errors.SUCCEEDED


def down(args: argparse.Namespace) -> int:
    """Take a cluster down."""
    chosen = [one for one in cluster.found(args.runs) if one.name.startswith(args.cluster)]
    if not chosen:
        older.refuse(args.cluster, args.runs, choice.answering())
    if len(chosen) != 1:
        known = ", ".join(one.name for one in chosen or cluster.found(args.runs)) or f"none in {args.shown}"
        which = "several clusters begin with" if chosen else "no cluster named"
        raise UsageError(f"{which} {args.cluster}", f"clusters here: {known}")
    name, engine = chosen[0].name, _own_engine(chosen[0].spec, chosen[0].plan)
    holding = _held([engine], name)
    if args.dry_run:
        for thing in [thing for _, thing in holding] + [f"folder {chosen[0].paths.root}"]:
            out(thing)
        return errors.SUCCEEDED
    if user := chosen[0].user():
        there = chosen[0].busy_with()
        raise UsageError(f"{user} uses {name}", f"python -m orchestrate {f'stop {there}' if there else 'ps'}")
    cluster.take_down(engine, chosen[0], grace=30)
    say(f"{name} is down")
    return errors.SUCCEEDED


def _paths(args: argparse.Namespace) -> JobPaths:
    """The files of the job that `args.job` names; the engines are asked only where the runs have no such job."""
    folder = args.runs / args.job
    local = folder.joinpath("plan.json").exists() and not owners.foreign(folder) and records.find(folder)
    return JobPaths(find(args, [] if local else choice.answering()))


@contextlib.contextmanager
def _watching(name: str) -> Iterator[None]:
    """End the command at Ctrl-C, and say that the job goes on."""
    try:
        yield
    except KeyboardInterrupt:
        say(f"{name} continues")
        raise SystemExit(errors.INTERRUPTED) from None


def show_logs(args: argparse.Namespace) -> int:
    """The workers' output."""
    paths = _paths(args)
    spec, plan = store.look(paths)
    chosen = launch.prefixes(plan)
    if args.rank is not None and args.rank not in chosen:
        raise UsageError(f"no rank {args.rank} in {paths.root.name}", f"its ranks are 0 to {len(chosen) - 1}")
    follower = logs.Follower(paths, chosen if args.rank is None else {args.rank: ""}, hide=Mask(spec.env, spec.secrets))
    with _watching(paths.root.name):
        while True:
            living = args.follow and not store.ended(paths) and lock.holder(paths)
            for line in follower.lines(end=not living):
                out(line)
            if not living:
                if args.follow and not store.ended(paths):
                    _unsupervised(paths)
                return errors.SUCCEEDED
            console.flush()
            console.progress(follower.progress(), out)
            time.sleep(0.1)


def attach(args: argparse.Namespace) -> int:
    """Look on while somebody else supervises the job; supervise it when nobody does; tell how it ended."""
    paths = _paths(args)
    spec, made = store.load(paths)
    follower, show = launch.rest(paths, spec, made), output(args)
    looking = False
    while not (data := store.ended(paths)):
        if supervisor := lock.holder(paths):
            if not looking:
                say(f"{supervisor} supervises {paths.root.name}; following it (Ctrl-C detaches)")
            looking = True
            with _watching(paths.root.name):
                for line in follower.lines():
                    show(line)
                console.progress(follower.progress(), show)
                time.sleep(0.1)
            continue
        if store.ended(paths):
            continue
        say(f"supervising {paths.root.name}")
        engine = _own_engine(spec, made)
        try:
            data = launch.supervise(paths, engine, count_signals(spec), say, follower, show)
            break
        except BlockingIOError:  # somebody else was faster
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if looking:
        for line in follower.lines(end=True):
            show(line)
    assert data
    return end(args, paths.root.name, data)


def wait(args: argparse.Namespace) -> int:
    """The end of a job."""
    paths = _paths(args)
    with _watching(paths.root.name):
        while not (data := store.ended(paths)):
            if not lock.holder(paths) and not store.ended(paths):
                _unsupervised(paths)
            time.sleep(0.1)
    return exit_code(data)


def _unsupervised(paths: JobPaths) -> NoReturn:
    """Raise OrchestrateError for a job that no supervisor follows, so that nothing reports its end."""
    name = paths.root.name
    raise OrchestrateError(
        f"{name} has no supervisor, and no report of its end", f"python -m orchestrate attach {name}"
    )


def stop(args: argparse.Namespace) -> int:
    """Stop a job, and look whether it is stopped."""
    paths, engines = _looked_up(args)
    name = paths.root.name
    if os.path.lexists(paths.root):
        records.need(paths.root)
    holding = _held(engines, name)
    if args.dry_run:
        for _, thing in holding:
            out(thing)
        return errors.SUCCEEDED
    if store.ended(paths) and not holding and not lock.holder(paths):
        say(f"{name} has ended already")
        return errors.SUCCEEDED
    _ask_to_stop(paths)
    holding = _held(engines, name)
    if holding or not store.ended(paths):
        say(f"{name} has no supervisor: removing its nodes")
        _finish(paths, holding)
    left = [thing for _, thing in _held(engines, name)]
    if left:
        raise OrchestrateError(f"{name} still has {', '.join(left)}", f"python -m orchestrate stop {name}")
    say(f"{name} is stopped")
    return errors.SUCCEEDED


def _ask_to_stop(paths: JobPaths) -> None:
    """Have whoever supervises a job stop it; return when it has no supervisor any more."""
    refused = 0
    while supervisor := lock.holder(paths):
        say(f"asking the supervisor of {paths.root.name} to stop")
        if not supervisor.ask_to_stop():  # it ends just now, or begins
            refused += 1
            if refused > MAX_PROOFS:
                raise OrchestrateError(
                    f"{paths.lock} is locked by a process that is not known to be its supervisor",
                    "stop the job where it was started, in the same container or as the same user",
                )
            time.sleep(0.1)
            continue
        while lock.holder(paths) == supervisor:
            time.sleep(0.1)


def _own_engine(spec: JobSpec, made: Plan) -> Engine:
    """The engine that a job was planned for, which its file may leave open."""
    return choice.engine_of(dataclasses.replace(spec, engine=made.engine))


def _looked_up(args: argparse.Namespace) -> tuple[JobPaths, list[Engine]]:
    """The files of a job, and all engines that answer; raises the error of the job's own one, where that does not."""
    engines = choice.answering()
    paths = JobPaths(find(args, engines))
    with contextlib.suppress(UsageError):  # its files say nothing any more
        spec, made = store.load(paths)
        if made.engine not in {engine.name for engine in engines}:
            return paths, [_own_engine(spec, made), *engines]
    return paths, engines


def _finish(paths: JobPaths, holding: list[tuple[Engine, str]]) -> None:
    """Stop what another supervisor has left, and write the report; what cannot be stopped in good order is removed.

    Raises OrchestrateError where nodes still have files that cannot be brought home.
    """
    try:
        spec, made = store.load(paths)
        engine = _own_engine(spec, made)
        more = count_signals(spec)
        data = launch.supervise(paths, engine, lambda: 1 + more(), say, launch.rest(paths, spec, made))
    except (OrchestrateError, BlockingIOError):
        return _remove(paths, holding)
    if why := data["left_behind"]:
        name = paths.root.name
        hint = f"mend that and stop it again; or have it removed, files and all: python -m orchestrate rm {name}"
        raise OrchestrateError(f"{name} still has nodes: {why}", hint)


def _remove(paths: JobPaths, holding: list[tuple[Engine, str]]) -> None:
    for engine in {id(engine): engine for engine, _ in holding}.values():
        engine.remove(paths.root.name, grace=30)
    records.end(paths.root)


def rm(args: argparse.Namespace) -> int:
    """Remove what a job has left, files and all; of a folder that was made elsewhere, the files alone."""
    paths, engines = _looked_up(args)
    name = paths.root.name
    ours = not os.path.lexists(paths.root) or records.find(paths.root)
    holding = _held(engines, name) if ours else []
    if supervisor := lock.holder(paths):
        raise UsageError(f"{name} is running, supervised by {supervisor}", f"python -m orchestrate stop {name}")
    if ours and paths.cluster:
        raise UsageError(f"{name} may still run on the nodes of a cluster", f"python -m orchestrate stop {name}")
    if args.dry_run:
        for thing in [thing for _, thing in holding] + [f"folder {paths.root}"]:
            out(thing)
        return errors.SUCCEEDED
    if ours:
        _remove(paths, holding)
    store.remove(paths)
    say(f"{name} is removed")
    return errors.SUCCEEDED


def _held(engines: list[Engine], name: str) -> list[tuple[Engine, str]]:
    """All that a job has, in which engine; raises UsageError where it is somebody else's."""
    for engine in engines:
        for state in engine.jobs():
            if state.job_id == name and state.owner not in (os.getuid(), -1):
                raise UsageError(f"{name} belongs to user {state.owner}", "ask them to stop it")
    return [(engine, thing) for engine in engines for thing in engine.holds(name)]


def print_schema(args: argparse.Namespace) -> int:
    """Print the JSON Schema of job files."""
    from orchestrate.job.schema import schema

    out(json.dumps(schema(), indent=2, ensure_ascii=False))
    return errors.SUCCEEDED


BY_NAME = {
    "ps": ps,
    "schema": print_schema,
    "down": down,
    "logs": show_logs,
    "attach": attach,
    "wait": wait,
    "stop": stop,
    "rm": rm,
}
