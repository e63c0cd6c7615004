"""`run`: a job, from its request to its end."""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING

from orchestrate import console, errors
from orchestrate.cli import cluster, display, options, request, result, signals
from orchestrate.cli.arguments import flags
from orchestrate.cli.commands import resume
from orchestrate.cli.parser import Parser
from orchestrate.console import out, print_message
from orchestrate.engines import choice
from orchestrate.engines.ports import port
from orchestrate.errors import UsageError
from orchestrate.files.paths import PACKAGE, PROJECT, STDIN, code_folder
from orchestrate.plan import preload
from orchestrate.plan.plan import Inventory, Placement, Plan, plan
from orchestrate.record import lock, run_dir
from orchestrate.record.paths import JobPaths
from orchestrate.show.feed import Feed
from orchestrate.spec import folders, worktree
from orchestrate.spec.spec import APP, JobSpec
from orchestrate.supervise import launch, stores

if TYPE_CHECKING:
    from orchestrate.engines.base import Engine


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `run`."""
    options.add_job_options(parser)
    parser.add_argument("--dry-run", action="store_true", help="print the plan without creating anything")
    options.add_stdout_options(parser)
    parser.add_argument(
        "--resume", type=options.job, dest="job", metavar="JOB", help="continue this job, as `resume` does"
    )
    parser.add_argument("--detach", action="store_true", help="run in the background, and print the run directory")
    options.add_runs(parser)


def run(args: argparse.Namespace) -> int:
    """Run a job until it ends, in this process or in the background; return its exit code."""
    if args.job:
        if args.script is not None or args.file or args.set or flags(args):
            raise UsageError("--resume uses the script and the settings of the job", "remove all other options")
        return resume.run(args)
    return show_plan(args) if args.dry_run else _start(args)


def show_plan(args: argparse.Namespace) -> int:
    """Print the plan of a job without creating anything, and return the exit code."""
    spec, engine, paths, revision = _request(args)
    inventory, own = engine.inventory(spec, paths.shared, run_image=False)
    own = dataclasses.replace(own, revision=revision())
    job_plan = _plan(args, spec, inventory, _placement(spec, inventory, own, paths, engine), paths)
    out(job_plan.to_json(spec.mask()) if getattr(args, "json", False) else job_plan)
    return errors.SUCCEEDED


def _start(args: argparse.Namespace) -> int:
    """Prepare, plan and launch a job, and return the exit code."""
    began = args.clock.monotonic()
    spec, engine, paths, revision = _request(args)
    stores.prepare(spec)
    engine.prepare(spec, paths.shared)
    inventory, own = engine.inventory(spec, paths.shared, run_image=True)
    own = dataclasses.replace(own, revision=revision())
    stdin = _read_stdin() if spec.stdin else None
    placement = _placement(spec, inventory, own, paths, engine)
    if placement is own:
        cluster.remove_kept(engine, args.runs)
        placement = cluster.keep(engine, spec, args.runs, own, paths.root.name) if spec.keep else own
    job_plan = _plan(args, spec, inventory, placement, paths)
    display.style_of(args, job_plan)  # before there is a job: its options may be wrong
    stops = signals.count(spec) if not args.detach else lambda: 0
    run_dir.create(spec, job_plan, paths)
    run_dir.keep_changes(spec, job_plan, paths)
    if stdin:
        _write_stdin(stdin, paths)
    if not options.quiet(args):
        print_message(str(job_plan))
    if args.detach:
        _detach(paths, args.shown)
        return errors.SUCCEEDED
    with display.shown(args, job_plan, paths) as shown:
        feed = Feed(paths, spec, job_plan, shown)
        data = launch.supervise(paths, engine, stops, feed, prepared=args.clock.monotonic() - began)
    return result.show(args, paths.root.name, data)


def _request(args: argparse.Namespace) -> tuple[JobSpec, Engine, JobPaths, Callable[[], str]]:
    """Return the spec, the engine and the paths of a new job, and a function that waits for the revision of its code.

    What takes time and needs no engine runs meanwhile.
    """
    spec = request.spec_of(args)
    code = code_folder(spec.command)
    preload.start(spec, code)  # while the engine's modules are imported
    revision = worktree.revision(code)
    return spec, choice.select_engine(spec), JobPaths(args.runs / run_dir.new_id(spec)), revision


def _plan(args: argparse.Namespace, spec: JobSpec, inventory: Inventory, placement: Placement, paths: JobPaths) -> Plan:
    """Return the plan of a new job; print what may surprise its user."""
    job_plan = plan(spec, inventory, placement, paths.root.name, port(placement.network, 0))
    if args.script is None and not args.file and spec.command == APP and Path.cwd() != PROJECT:
        print_message(f"no script given: this is the example, {APP[1]}; yours: {args.command} SCRIPT.py")
    for mount in folders.mounts(spec):
        if real := folders.led_out(mount.source):
            print_message(f"{mount.source} is a link: the job can read {real}")
    if not placement.keep:  # otherwise said before its nodes were started
        cluster.warn_of_crowd(job_plan)
    return job_plan


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


def _placement(spec: JobSpec, inventory: Inventory, own: Placement, paths: JobPaths, engine: Engine) -> Placement:
    """Return the job's placement on the first cluster that fits, otherwise `own`; print why clusters do not fit."""
    runs, job_id = paths.root.parent, paths.root.name
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
    while not lock.holder(paths) and not run_dir.ended(paths) and child.poll() is None:
        time.sleep(0.02)
    child.returncode = child.returncode or 0  # avoids a ResourceWarning: it outlives this process
    print_message(f"hint: python -m orchestrate attach {run.name} follows it; supervisor log: {run / 'supervisor.log'}")
    out(run)
