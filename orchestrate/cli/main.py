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
from orchestrate.console import out, phase, say
from orchestrate.engines import choice
from orchestrate.engines.ports import port
from orchestrate.errors import OrchestrateError, UsageError
from orchestrate.files import lock, log_file
from orchestrate.files.paths import PACKAGE, JobPaths, hidden
from orchestrate.job import owners, store
from orchestrate.job.plan import Inventory, Placement, counted, plan
from orchestrate.job.redact import HIDDEN
from orchestrate.job.spec import APP, JobSpec, read_file, read_set, resolve, unencodable
from orchestrate.supervise import launch

if TYPE_CHECKING:
    from orchestrate.engines.base import Engine

IMPORT_TIMEOUT = 120.0  # seconds that nodes of a cluster may take to import what workers need; torch takes 2 to 20


def main(argv: list[str]) -> int:
    """Run a command; return its exit code. All that it printed is written then, for the process ends at once."""
    console.prepare()
    code = _guarded(argv)
    if failure := console.finish():
        say(f"error: not all of the output was written: {failure}")
        console.finish()
        code = code or errors.FAILED
    return code


def _guarded(argv: list[str]) -> int:
    """Run a command; tell what went wrong."""
    try:
        return _command(argv)
    except OrchestrateError as error:
        say(f"error: {error}")
        if error.hint:
            say(f"hint: {error.hint}")
        return error.exit_code
    except KeyboardInterrupt:
        say("stopped")
        return errors.INTERRUPTED
    except SystemExit as end:  # argparse has printed the help or the version, or a user has detached from a job
        return end.code if isinstance(end.code, int) else errors.SUCCEEDED
    except console.Closed:
        return errors.SUCCEEDED
    except OSError as error:  # a full disk, a file of another user
        say(f"error: {error.strerror or error}" + f": {error.filename}" * bool(error.filename))
        return errors.FAILED


def _command(argv: list[str]) -> int:
    args, script = parse(argv)
    with log_file.shown("debug" if args.verbose else os.environ.get("LOGLEVEL", "")):
        return _dispatch(args, script)


def _dispatch(args: argparse.Namespace, script: list[str] | None) -> int:
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UsageError("the current folder does not exist any more", "cd to a folder that does") from None
    if "runs" in args:
        _settle_runs(args)
    if args.command == "doctor":
        return commands.doctor(_spec(args, script))
    if args.command == "export":
        return _export(args, script)
    if args.command in RUN_COMMANDS and not (args.command == "up" and script is not None):
        return _run(args, script)
    if script is not None:
        raise UsageError(f"{args.command} does not take a script", f"python -m orchestrate {args.command} --help")
    return commands.BY_NAME[args.command](args)


def _settle_runs(args: argparse.Namespace) -> None:
    """Set the folder of jobs, and for a job that is named by its folder, or as the latest, its name there.

    Raises UsageError for a folder that cannot be used: a link may have come with a project, for example.
    """
    if args.command in RUN_COMMANDS and args.runs is None and RUNS.is_symlink():
        raise UsageError(f"{RUNS} is a symbolic link", "to use the folder that it points to: --runs DIR")
    args.shown, name = args.runs or RUNS, vars(args).get("job", "")
    if "/" in name:
        args.shown, args.job = Path(name).parent, Path(name).name
    args.runs = owners.check(args.shown)
    if name == LATEST:
        args.job = latest(args.runs, args.shown)


def _spec(args: argparse.Namespace, script: list[str] | None) -> JobSpec:
    """The job that the command line asks for."""
    typed = read_set(args.set) | flags(args) | ({"command": script} if script is not None else {})
    layers = [read_file(args.file) if args.file else {}, typed]
    spec = resolve(*layers)
    if name := next((name for name, value in spec.env.items() if value == HIDDEN), ""):
        raise UsageError(
            f"env.{name} is {HIDDEN}, which job.yaml has in the place of a secret",
            f"set it in your own job file, or with --set env.{name}=VALUE",
        )
    runs = args.command not in ("up", "doctor")
    if runs and spec.command == APP and "command" not in {key for layer in layers for key in layer} and hidden():
        raise UsageError(
            "no script, and `app` in this folder would be run instead of the default job",
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
        raise UsageError(f"--form {form}", f"{args.target} has {', '.join(forms)}" if forms[0] else "compose has none")
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
    engine = choice.engine_of(spec)
    job_id = store.new_id(spec)
    paths = JobPaths(args.runs / job_id)
    if not dry:
        engine.prepare(spec)
    inventory, own = engine.inventory(spec, paths.shared, look_inside=not dry)
    placement = _placement(spec, inventory, own, job_id, paths.root.parent, engine)
    made = plan(spec, inventory, placement, job_id, port(placement.network, 0))
    if dry:
        out(made)
        return errors.SUCCEEDED
    stops = commands.count_signals(spec) if not args.detach else lambda: 0
    store.create(spec, made, paths)
    say(str(made))
    if args.detach:
        _detach(paths, args.shown)
        return errors.SUCCEEDED
    data = launch.supervise(paths, engine, stops, say, output=commands.output(args))
    return commands.end(args, job_id, data)


def _up(spec: JobSpec, runs: Path) -> int:
    name, engine = spec.name or "cluster", choice.engine_of(spec)
    phase(f"starting {counted(spec.trainers + 1 + spec.spares, 'node')}")
    made, session = cluster.bring_up(engine, dataclasses.replace(spec, name=name), runs)
    nodes = len(made.plan.nodes)
    if packages := ", ".join(made.plan.placement.packages):
        phase(f"importing {packages} in {counted(nodes, 'node')}")
        try:
            if not session.warmed(made.plan.nodes, IMPORT_TIMEOUT):
                say(f"the nodes are still importing {packages}; the first job will wait for them")
        except BaseException:  # Ctrl-C
            cluster.take_down(engine, made, 0)
            raise
        phase("")
    be = "is" if nodes == 1 else "are"
    say(f"{counted(nodes, 'node')} {be} up, for jobs from {made.plan.placement.code}")
    for one in cluster.found(runs):
        if one.name != made.name and one.plan.placement.code == made.plan.placement.code:
            say(f"note: {one.name} is up as well")
    say(f"hint: python -m orchestrate run uses them; python -m orchestrate down {made.name} removes them")
    out(made.name)
    return errors.SUCCEEDED


def _placement(
    spec: JobSpec, inventory: Inventory, own: Placement, job_id: str, runs: Path, engine: Engine
) -> Placement:
    """The nodes of the first cluster that fits a job; its `own` where none does, with the reasons."""
    for one in cluster.found(runs):
        there = one.placement(own, job_id)
        differences = one.differences(spec, plan(spec, inventory, there, job_id, 0))
        if not differences:
            return there
        say(f"{one.name} does not fit: {'; '.join(differences)}")
    for one in cluster.elsewhere(engine, runs):
        if one.plan.placement.code == own.code:
            say(f"not using {one.name}: its jobs are in {one.paths.root.parent} (--runs {one.paths.root.parent})")
    return own


def _detach(paths: JobPaths, shown: Path) -> None:
    """Have a process of its own supervise a job, whose folder is shown as in `shown`; return once it does."""
    run = shown / paths.root.name
    safe = ["-I"] if sys.flags.isolated else ["-P"] if getattr(sys.flags, "safe_path", False) else []
    command = [sys.executable, *safe, "-m", "orchestrate", "attach", run.name, "--runs", str(paths.root.parent)]
    with open(paths.supervisor_log, "w", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
        child = subprocess.Popen(
            command,
            cwd=PACKAGE.parent,  # `-m` looks in the current folder first, where another orchestrate.py may be
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    while not lock.holder(paths) and not store.ended(paths) and child.poll() is None:
        time.sleep(0.02)
    child.returncode = child.returncode or 0  # it outlives us
    say(f"hint: python -m orchestrate attach {run.name}; its supervisor writes to {run / 'supervisor.log'}")
    out(run)
