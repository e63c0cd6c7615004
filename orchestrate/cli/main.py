"""The command line."""

from __future__ import annotations

import argparse
import dataclasses
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrate import console, errors
from orchestrate.cli import cluster, commands
from orchestrate.cli.arguments import EXPORTS, LATEST, RUN_COMMANDS, RUNS, flags, parse
from orchestrate.cli.find import latest
from orchestrate.console import out, phase, print_message
from orchestrate.engines import choice
from orchestrate.engines.ports import port
from orchestrate.errors import OrchestrateError, UsageError
from orchestrate.files import lock, log_file
from orchestrate.files.paths import PACKAGE, JobPaths, code_folder, hidden
from orchestrate.job import owners, preload, store
from orchestrate.job.plan import Inventory, Placement, plan, pluralize
from orchestrate.job.redact import HIDDEN
from orchestrate.job.spec import APP, JobSpec, read_file, read_set, resolve, unencodable
from orchestrate.job.strict_yaml import shown
from orchestrate.supervise import launch

if TYPE_CHECKING:
    from orchestrate.engines.base import Engine

IMPORT_TIMEOUT = 120.0  # seconds for the nodes of a cluster to import packages; torch takes 2 to 20


def main(argv: list[str]) -> int:
    """Run a command and return its exit code. Flushes all output, since the process ends without cleanup."""
    console.prepare()
    code = _run_guarded(argv)
    if failure := console.finish():
        print_message(f"error: could not write all output: {failure}")
        console.finish()
        code = code or errors.FAILED
    return code


def _run_guarded(argv: list[str]) -> int:
    """Run a command; report errors and return the exit code."""
    try:
        return _command(argv)
    except OrchestrateError as error:
        print_message(f"error: {error}")
        if error.hint:
            print_message(f"hint: {error.hint}")
        return error.exit_code
    except KeyboardInterrupt:
        print_message("stopped")
        return errors.INTERRUPTED
    except SystemExit as end:  # argparse printed the help or version, or a user detached from a job
        return end.code if isinstance(end.code, int) else errors.SUCCEEDED
    except console.Closed:
        return errors.SUCCEEDED
    except OSError as error:  # a full disk, a file of another user
        print_message(f"error: {error.strerror or error}" + f": {error.filename}" * bool(error.filename))
        return errors.FAILED


def _command(argv: list[str]) -> int:
    args, script = parse(argv)
    with log_file.shown("debug" if args.verbose else os.environ.get("LOGLEVEL", "")):
        return _dispatch(args, script)


def _dispatch(args: argparse.Namespace, script: list[str] | None) -> int:
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UsageError("the current folder no longer exists", "cd to an existing folder") from None
    if "runs" in args:
        _resolve_runs(args)
    if args.command == "doctor":
        return commands.doctor(_spec(args, script))
    if args.command == "export":
        return _export(args, script)
    if args.command in RUN_COMMANDS and not (args.command == "up" and script is not None):
        return _run(args, script)
    if script is not None:
        raise UsageError(f"{args.command} does not take a script", f"python -m orchestrate {args.command} --help")
    return commands.BY_NAME[args.command](args)


def _resolve_runs(args: argparse.Namespace) -> None:
    """Resolve `--runs`, and replace a run directory or `latest` given as the job by the job's name.

    Raises UsageError for a folder that cannot be used: for example, a link that may have come with a project.
    """
    if args.command in RUN_COMMANDS and args.runs is None and RUNS.is_symlink():
        raise UsageError(f"{RUNS} is a symbolic link", "pass the folder that it points to: --runs DIR")
    args.shown, name = args.runs or RUNS, vars(args).get("job", "")
    if "/" in name:
        args.shown, args.job = Path(name).parent, Path(name).name
    args.runs = owners.check(args.shown)
    if name == LATEST:
        args.job = latest(args.runs, args.shown)


def _spec(args: argparse.Namespace, script: list[str] | None) -> JobSpec:
    """Return the spec of the job that the command line describes."""
    options = read_set(args.set) | flags(args) | ({"command": script} if script is not None else {})
    layers = [read_file(args.file) if args.file else {}, options]
    spec = resolve(*layers)
    if name := next((name for name, value in spec.env.items() if value == HIDDEN), ""):
        raise UsageError(
            f"env.{name} is {HIDDEN}, the placeholder for a secret in job.yaml",
            f"set it in your own job file, or with --set env.{name}=VALUE",
        )
    runs_command = args.command not in ("up", "doctor")
    if (
        runs_command
        and spec.command == APP
        and "command" not in {key for layer in layers for key in layer}
        and hidden()
    ):
        raise UsageError(
            "no script given, and `app` in this folder would run instead of the default job",
            f"python -m orchestrate {args.command} SCRIPT.py",
        )
    if why := unencodable(spec):
        raise UsageError(why, "export LC_ALL=C.UTF-8")
    return launch.check_script(spec)


def _export(args: argparse.Namespace, script: list[str] | None) -> int:
    with choice.sdk():
        from orchestrate.export.compose import compose
        from orchestrate.export.kubernetes import kubernetes
        from orchestrate.export.slurm import slurm

    forms = EXPORTS[args.target] or ("",)
    form = args.form or forms[0]
    if form not in forms:
        hint = f"choose from {', '.join(forms)}" if forms[0] else "compose has no forms: remove --form"
        raise UsageError(f"unknown form {shown(form)}", hint)
    spec = _spec(args, script)
    name = store.slug(spec)
    write = {"kubernetes": kubernetes, "slurm": slurm}
    text = write[args.target](spec, name, form) if args.target in write else compose(spec, name)
    console.copy(text)
    return errors.SUCCEEDED


def _run(args: argparse.Namespace, script: list[str] | None) -> int:
    spec = _spec(args, script)
    if args.command == "up":
        return _up(spec, args.runs)
    dry = args.command == "plan" or args.dry_run
    preload.start(spec, code_folder(spec.command))  # while the engine's modules are imported
    engine = choice.select_engine(spec)
    job_id = store.new_id(spec)
    paths = JobPaths(args.runs / job_id)
    if not dry:
        engine.prepare(spec)
    inventory, own = engine.inventory(spec, paths.shared, run_image=not dry)
    placement = _placement(spec, inventory, own, job_id, paths.root.parent, engine)
    job_plan = plan(spec, inventory, placement, job_id, port(placement.network, 0))
    if dry:
        out(job_plan)
        return errors.SUCCEEDED
    stops = commands.count_signals(spec) if not args.detach else lambda: 0
    store.create(spec, job_plan, paths)
    print_message(str(job_plan))
    if args.detach:
        _detach(paths, args.shown)
        return errors.SUCCEEDED
    data = launch.supervise(paths, engine, stops, print_message, output=commands.output(args))
    return commands.end(args, job_id, data)


def _up(spec: JobSpec, runs: Path) -> int:
    name, engine = spec.name or "cluster", choice.select_engine(spec)
    phase(f"starting {pluralize(spec.trainers + 1 + spec.spares, 'node')}")
    created, session = cluster.bring_up(engine, dataclasses.replace(spec, name=name), runs)
    nodes = len(created.plan.nodes)
    if packages := ", ".join(created.plan.placement.packages):
        phase(f"importing {packages} in {pluralize(nodes, 'node')}")
        try:
            if not session.wait_until_warm(created.plan.nodes, IMPORT_TIMEOUT):
                print_message(f"the nodes are still importing {packages}; the first job waits for them")
        except BaseException:  # Ctrl-C
            cluster.take_down(engine, created, 0)
            raise
        phase("")
    verb = "is" if nodes == 1 else "are"
    print_message(f"{pluralize(nodes, 'node')} {verb} up for jobs started in {created.plan.placement.code}")
    for other in cluster.found(runs):
        if other.name != created.name and other.plan.placement.code == created.plan.placement.code:
            print_message(f"note: {other.name} is also up")
    print_message(f"hint: python -m orchestrate run uses them; python -m orchestrate down {created.name} removes them")
    out(created.name)
    return errors.SUCCEEDED


def _placement(
    spec: JobSpec, inventory: Inventory, own: Placement, job_id: str, runs: Path, engine: Engine
) -> Placement:
    """Return the job's placement on the first cluster that fits, otherwise `own`; print why clusters do not fit."""
    for candidate in cluster.found(runs):
        placement = candidate.placement(own, job_id)
        reasons = candidate.differences(spec, plan(spec, inventory, placement, job_id, 0))
        if not reasons:
            return placement
        print_message(f"not using {candidate.name}: {'; '.join(reasons)}")
    for other in cluster.elsewhere(engine, runs):
        if other.plan.placement.code == own.code:
            print_message(f"not using {other.name}: its jobs are in another folder (--runs {other.paths.root.parent})")
    return own


def _detach(paths: JobPaths, runs: Path) -> None:
    """Start a supervisor in the background, and return once it has the job; prints the run directory as in `runs`."""
    run = runs / paths.root.name
    safe = ["-I"] if sys.flags.isolated else ["-P"] if getattr(sys.flags, "safe_path", False) else []
    command = [sys.executable, *safe, "-m", "orchestrate", "attach", run.name, "--runs", str(paths.root.parent)]
    with open(paths.supervisor_log, "w", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
        child = subprocess.Popen(
            command,
            cwd=PACKAGE.parent,  # `-m` searches the current folder first, which may have another orchestrate.py
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    while not lock.holder(paths) and not store.ended(paths) and child.poll() is None:
        time.sleep(0.02)
    child.returncode = child.returncode or 0  # avoids a ResourceWarning: it outlives this process
    print_message(f"hint: python -m orchestrate attach {run.name} follows it; supervisor log: {run / 'supervisor.log'}")
    out(run)
