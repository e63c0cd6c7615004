"""From a spec to a job on disk: what it needs is there, its plan is made, and a supervisor can take it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO

from orchestrate.api import cluster, gpu_queue
from orchestrate.console import print_message
from orchestrate.dataclass import dataclass, field
from orchestrate.engines import registry
from orchestrate.engines.base import Engine
from orchestrate.engines.ports import port
from orchestrate.errors import OrchestrateError, UsageError
from orchestrate.files.folder import replacing_links
from orchestrate.files.paths import PACKAGE, code_folder
from orchestrate.host import claims
from orchestrate.plan import preload
from orchestrate.plan.plan import Inventory, Placement, Plan, plan
from orchestrate.record import lock, run_dir
from orchestrate.record.paths import JobPaths
from orchestrate.spec import folders, worktree
from orchestrate.spec.spec import JobSpec
from orchestrate.supervise import open_stores

_bound: list[IO[bytes]] = []  # pipes to supervisors, which end with this process
os.register_at_fork(after_in_child=lambda: [pipe.close() for pipe in _bound])  # and not with its children


@dataclass(frozen=True)
class Prepared:
    """A job that can be created and supervised."""

    spec: JobSpec
    plan: Plan
    paths: JobPaths
    engine: Engine
    held: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)  # the lock of a cluster, until `create`
    claim: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)  # of GPUs, until it has a supervisor

    def create(self, files: Mapping[str, IO[bytes]]) -> None:
        """Create the run directory, with files in the job folder, by name; raises UsageError, OSError."""
        with self.held:
            run_dir.create(self.spec, self.plan, self.paths)
        run_dir.keep_changes(self.spec, self.plan, self.paths)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        for name, content in files.items():
            with self.paths.folder.opened() as folder:
                descriptor = os.open(name, flags, 0o644, dir_fd=folder)
            with content, os.fdopen(descriptor, "wb") as file:
                os.fchmod(descriptor, 0o644)
                shutil.copyfileobj(content, file)


def prepare(spec: JobSpec, runs: Path, on: str = "") -> Prepared:
    """Build or fetch what a job needs, and plan it: on a cluster in the folder `runs` that fits, or nodes of its own.

    `on` is the name of the only cluster that will do. The nodes are started already if the spec has `keep`. Raises
    OrchestrateError.
    """
    engine, paths, revision = _begin(spec, runs)
    open_stores.prepare(spec)
    engine.prepare(spec, paths.shared)
    with contextlib.ExitStack() as held, contextlib.ExitStack() as claim:
        ticket = claim.enter_context(claims.Ticket(paths.root.name, paths.root.parent))
        inventory, own = gpu_queue.reserve(engine, spec, paths, ticket)
        own = dataclasses.replace(own, revision=revision())
        placement = _placement(spec, inventory, own, paths, engine, held, on)
        if placement is own:
            cluster.remove_kept(engine, runs)
            placement = cluster.keep(engine, spec, runs, inventory, own, paths.root.name, held) if spec.keep else own
        job_plan = _plan(spec, inventory, placement, paths)
        return Prepared(spec, job_plan, paths, engine, held.pop_all(), claim.pop_all())


def planned(spec: JobSpec, runs: Path) -> Plan:
    """Return the plan of a job without creating anything; raises OrchestrateError."""
    engine, paths, revision = _begin(spec, runs)
    inventory, own = engine.inventory(dataclasses.replace(spec, queue=False), paths.shared, run_image=False)
    own = dataclasses.replace(own, revision=revision())
    return _plan(spec, inventory, _placement(spec, inventory, own, paths, engine), paths)


def hand_over(job: Prepared, bound: bool = False) -> None:
    """Start the supervisor of a job in the background, as `start_supervisor`; with Slurm, submit the job instead.

    Raises OrchestrateError if Slurm refuses it.
    """
    if job.plan.engine == "slurm":
        from orchestrate.api.submit import submit  # only here: it takes time to import

        submit(job.engine, job.spec, job.plan, job.paths)
    else:
        start_supervisor(job.paths, bound)


def start_supervisor(paths: JobPaths, bound: bool = False) -> None:
    """Start a supervisor in the background, and return once it has the job; if `bound`, it stops with this process.

    Ctrl-C stops it. Raises OrchestrateError if it has ended before.
    """
    safe = ["-I"] if sys.flags.isolated else ["-P"] if getattr(sys.flags, "safe_path", False) else []
    command = [sys.executable, *safe, "-m", "orchestrate", "attach", paths.root.name, "--runs", str(paths.root.parent)]
    command += ["--until-eof"] * bound
    with open(paths.supervisor_log, "w", opener=replacing_links) as file:
        child = subprocess.Popen(
            command,
            cwd=PACKAGE.parent,  # `-m` searches the current folder first, which may have another orchestrate.py
            stdin=subprocess.PIPE if bound else subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        if child.stdin:
            _bound.append(child.stdin)
        threading.Thread(target=_reap, args=(child,), daemon=True).start()
        while not _is_taken(paths):
            if child.poll() is not None and not _is_taken(paths):
                hint = f"see {paths.supervisor_log}; python -m orchestrate attach {paths.root.name} starts it again"
                raise OrchestrateError(f"the supervisor of {paths.root.name} has ended at once", hint)
            time.sleep(0.02)
    except BaseException:  # Ctrl-C: otherwise, the job would run although its command says that it was stopped
        child.terminate()
        raise


def _is_taken(paths: JobPaths) -> bool:
    return bool(lock.supervisor(paths) or run_dir.ended(paths))


def _reap(child: subprocess.Popen[bytes]) -> None:
    """Wait for a supervisor, which may outlive this process."""
    child.wait()
    if child.stdin:
        _bound.remove(child.stdin)
        child.stdin.close()


def _begin(spec: JobSpec, runs: Path) -> tuple[Engine, JobPaths, Callable[[], str]]:
    """Return the engine and the paths of a new job, and a function that waits for the revision of its code.

    What takes time and needs no engine runs meanwhile.
    """
    code = code_folder(spec.command)
    preload.start(spec, code)  # while the engine's modules are imported
    revision = worktree.revision(code)
    return registry.select_engine(spec), run_dir.new_paths(spec, runs), revision


def _placement(
    spec: JobSpec,
    inventory: Inventory,
    own: Placement,
    paths: JobPaths,
    engine: Engine,
    held: contextlib.ExitStack | None = None,
    on: str = "",
) -> Placement:
    """Return the job's placement on the first cluster that fits, otherwise `own`; print why clusters do not fit.

    `held`, if given, gets the cluster's lock. Raises UsageError if the cluster `on`, if given, does not fit.
    """
    runs, job_id = paths.root.parent, paths.root.name
    candidates = cluster.found(runs)
    for candidate in cluster.remove_abandoned(engine, candidates) if held else candidates:
        if candidate.private and candidate.name != on:
            continue
        placement = candidate.placement(own, job_id)
        reasons = candidate.differences(spec, plan(spec, inventory, placement, job_id, 0))
        if not reasons and on in ("", candidate.name):
            if held is None or candidate.take(held):
                return placement
            reasons = ["another process has just taken it"]
        if on == candidate.name:
            raise UsageError(f"{on} cannot run this job: {'; '.join(reasons)}", "start another cluster for it")
        if on:
            continue
        if candidate.plan.placement.keep and not candidate.user():
            continue  # removed if the job needs its memory
        print_message(f"not using {candidate.name}: {'; '.join(reasons)}")
    if on:
        raise UsageError(f"the cluster {on} does not exist anymore", "start another one")
    others = cluster.elsewhere(engine, runs)
    for other in cluster.remove_abandoned(engine, others) if held else others:
        if other.plan.placement.code == own.code:
            print_message(f"not using {other.name}: its jobs are in another folder (--runs {other.paths.root.parent})")
    return own


def warn_of_links(spec: JobSpec) -> None:
    """Say which folders of a job are links out of the current one, which may have come with a project."""
    for mount in folders.mounts(spec):
        if real := folders.led_out(mount.source):
            print_message(f"{mount.source} is a link: the job can read {real}")


def _plan(spec: JobSpec, inventory: Inventory, placement: Placement, paths: JobPaths) -> Plan:
    """Return the plan of a new job; print what may surprise its user."""
    job_plan = plan(spec, inventory, placement, paths.root.name, port(placement.network, 0))
    warn_of_links(spec)
    if not placement.keep:  # otherwise said before its nodes were started
        cluster.warn_of_crowd(job_plan)
    return job_plan
