"""The command line."""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING

from orchestrate import console, errors
from orchestrate.cli import attach, cluster, commands, defaults, events, logs, prune, ps, report, resume, top, watch
from orchestrate.cli.arguments import flags, parse
from orchestrate.cli.find import resolve_runs
from orchestrate.cli.options import RUN_COMMANDS
from orchestrate.cli.parser import EXPORTS
from orchestrate.console import out, phase, print_message
from orchestrate.engines import choice
from orchestrate.engines.ports import port
from orchestrate.errors import OrchestrateError, UsageError
from orchestrate.files import bounded, lock, log_file
from orchestrate.files.paths import PACKAGE, STDIN, JobPaths, code_folder, hidden
from orchestrate.job import folders, preload, requirements, secret_files, source, store
from orchestrate.job.layers import read_file, read_set, resolve
from orchestrate.job.plan import Inventory, Placement, plan, pluralize
from orchestrate.job.redact import HIDDEN
from orchestrate.job.spec import APP, JobSpec, unencodable
from orchestrate.job.strict_yaml import shown as quoted
from orchestrate.supervise import launch, stores
from orchestrate.supervise.notify import is_url

if TYPE_CHECKING:
    from orchestrate.engines.base import Engine


def _serve(args: argparse.Namespace) -> int:
    from orchestrate.cli.serve import serve  # only here: Python's HTTP server takes time to import

    return serve(args)


BY_NAME = {
    **commands.BY_NAME,
    "attach": attach.attach,
    "events": events.show_events,
    "logs": logs.show_logs,
    "prune": prune.prune,
    "report": report.write_report,
    "ps": ps.ps,
    "resume": resume.resume,
    "serve": _serve,
    "top": top.top,
}
IMPORT_TIMEOUT = 120.0  # seconds for the nodes of a cluster to import packages; torch takes 2 to 20


def main(argv: list[str]) -> int:
    """Run a command and return its exit code. Flushes all output, since the process ends without cleanup."""
    console.prepare()
    code = _run_guarded(argv)
    bounded.end()
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
    if "quiet" in args and watch.quiet(args):
        console.mute()
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UsageError("the current folder no longer exists", "cd to an existing folder") from None
    if resumes := bool(vars(args).get("resume")):
        args.job = args.resume
        if script is not None or args.file or args.set or flags(args):
            raise UsageError("--resume uses the script and the settings of the job", "remove all other options")
    if "runs" in args:
        resolve_runs(args)
    if resumes:
        return resume.resume(args)
    if args.command == "doctor":
        return commands.doctor(_spec(args, script))
    if args.command == "export":
        return _export(args, script)
    if args.command in RUN_COMMANDS and not (args.command == "up" and script is not None):
        return _run(args, script)
    if script is not None:
        raise UsageError(f"{args.command} does not take a script", f"python -m orchestrate {args.command} --help")
    return BY_NAME[args.command](args)


def _spec(args: argparse.Namespace, script: list[str] | None) -> JobSpec:
    """Return the spec of the job that the command line describes."""
    options = read_set(args.set) | flags(args) | ({"command": script} if script is not None else {})
    of_file = read_file(args.file) if args.file else {}
    layers = [defaults.layer(), of_file, options]
    if (target := str(of_file.get("on_event") or "")) and not is_url(target):
        raise UsageError("on_event in a job file must be a URL", "pass a command with --on-event, since it runs here")
    spec = resolve(*layers)
    if name := next((name for name, value in spec.env.items() if value == HIDDEN), ""):
        raise UsageError(
            f"env.{name} is {HIDDEN}, the placeholder for a secret in job.yaml",
            f"export {name}, and use -e {name}; or set it in your own job file",
        )
    runs_command = args.command not in ("up", "doctor")
    spec = secret_files.with_contents(folders.with_absolute(_with_requirements(spec)))
    source.enter(spec)
    default = spec.command == APP and "command" not in {key for layer in layers for key in layer}
    if runs_command and default and (spec.source or hidden()):
        what = (
            "although source is set" if spec.source else "and `app` in this folder would run instead of the default job"
        )
        raise UsageError(f"no script given, {what}", f"python -m orchestrate {args.command} SCRIPT.py")
    if why := unencodable(spec):
        raise UsageError(why, "export LC_ALL=C.UTF-8")
    return launch.check_script(spec)


def _with_requirements(spec: JobSpec) -> JobSpec:
    """Replace the requirements file by its lines, so that the job does not depend on the file any longer."""
    if not spec.requirements:
        return spec
    lines = [*requirements.read(Path(spec.requirements)), *spec.pip]
    return dataclasses.replace(spec, requirements="", pip=lines)


def _export(args: argparse.Namespace, script: list[str] | None) -> int:
    with choice.sdk():
        from orchestrate.export.compose import compose
        from orchestrate.export.kubernetes import kubernetes
        from orchestrate.export.slurm import slurm

    forms = EXPORTS[args.target] or ("",)
    form = args.form or forms[0]
    if form not in forms:
        hint = f"choose from {', '.join(forms)}" if forms[0] else "compose has no forms: remove --form"
        raise UsageError(f"unknown form {quoted(form)}", hint)
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
    revision = source.revision(code_folder(spec.command))
    engine = choice.select_engine(spec)
    job_id = store.new_id(spec)
    paths = JobPaths(args.runs / job_id)
    if not dry:
        stores.prepare(spec)
        engine.prepare(spec, paths.shared)
    inventory, own = engine.inventory(spec, paths.shared, run_image=not dry)
    own = dataclasses.replace(own, revision=revision())
    stdin = _read_stdin() if spec.stdin and not dry else None
    placement = _placement(spec, inventory, own, job_id, paths.root.parent, engine)
    if placement is own and not dry:
        cluster.remove_kept(engine, args.runs)
        placement = cluster.keep(engine, spec, args.runs, own, job_id) if spec.keep else own
    job_plan = plan(spec, inventory, placement, job_id, port(placement.network, 0))
    if dry:
        out(job_plan.to_json() if getattr(args, "json", False) else job_plan)
        return errors.SUCCEEDED
    watch.style_of(args, job_plan)  # before there is a job: its options may be wrong
    stops = commands.count_signals(spec) if not args.detach else lambda: 0
    store.create(spec, job_plan, paths)
    store.keep_changes(spec, job_plan, paths)
    if stdin:
        _write_stdin(stdin, paths)
    if not watch.quiet(args):
        print_message(str(job_plan))
    if args.detach:
        _detach(paths, args.shown)
        return errors.SUCCEEDED
    with watch.shown(args, job_plan, paths) as shown:
        data = launch.supervise(paths, engine, stops, shown)
    return commands.end(args, job_id, data)


@console.during("reading standard input")
def _read_stdin() -> IO[bytes]:
    """Read our standard input to its end, into a temporary file: a job exists only once it is complete."""
    if sys.stdin is None:
        raise UsageError("standard input is closed", "remove --stdin, or use < FILE")
    file = tempfile.TemporaryFile()  # noqa: SIM115 (`_write_stdin` closes it)
    shutil.copyfileobj(sys.stdin.buffer, file)
    file.seek(0)
    return file


def _write_stdin(content: IO[bytes], paths: JobPaths) -> None:
    """Write what rank 0 reads to the job folder, before workers start; raises OSError."""
    with paths.folder.opened() as folder:
        descriptor = os.open(STDIN, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644, dir_fd=folder)
    with content, os.fdopen(descriptor, "wb") as file:
        os.fchmod(descriptor, 0o644)
        shutil.copyfileobj(content, file)


def _up(spec: JobSpec, runs: Path) -> int:
    name, engine = spec.name or "cluster", choice.select_engine(spec)
    stores.prepare(spec)
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
        if candidate.plan.placement.keep and not candidate.user():
            continue  # removed if the job needs its memory
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
