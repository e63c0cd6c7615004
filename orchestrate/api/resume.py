"""Another generation of a job that has ended, with the files of its run directory."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
from pathlib import Path

from orchestrate.api import gpu_queue, removal
from orchestrate.api.check_script import check_script
from orchestrate.api.prepare import Prepared, warn_of_links
from orchestrate.engines import registry
from orchestrate.engines.ports import port
from orchestrate.errors import UsageError
from orchestrate.files.paths import code_folder
from orchestrate.host import claims, records, users
from orchestrate.plan.plan import Inventory, Placement, Plan, plan
from orchestrate.record import lock, run_dir
from orchestrate.record.events import JobResumed
from orchestrate.record.history import History
from orchestrate.record.outcomes import Outcome
from orchestrate.record.paths import JobPaths
from orchestrate.spec import folders, source, worktree
from orchestrate.spec.spec import JobSpec
from orchestrate.supervise import launch, open_stores


def resume(paths: JobPaths, wait: bool = False) -> Prepared:
    """Prepare a job that was stopped, failed or was lost, so that a supervisor continues it.

    Its image and GPUs are checked again; `wait` puts it into the queue for GPUs, as the key `queue` does. Makes the
    job's code folder the current one. Raises OrchestrateError.
    """
    try:
        return _resume(paths, wait)
    except FileNotFoundError:
        if paths.root.is_dir():
            raise
        raise UsageError(f"{paths.root.name} was removed meanwhile", "python -m orchestrate ps --all") from None


def _resume(paths: JobPaths, wait: bool) -> Prepared:
    check(paths)
    spec, last = run_dir.load(paths)
    spec = dataclasses.replace(spec, queue=spec.queue or wait)
    try:
        source.go_to(Path(last.placement.code))
    except OSError as error:
        hint = "restore the folder (a link is not followed), or start a new job"
        raise UsageError(f"cannot enter the job's code folder {last.placement.code}: {error.strerror}", hint) from None
    folders.check_again(spec)
    warn_of_links(spec)
    check_script(spec)
    open_stores.prepare(spec)
    engine, name = registry.of_plan(spec, last), paths.root.name
    engine.prepare(spec, paths.shared)
    with contextlib.ExitStack() as claim:
        inventory, placement = gpu_queue.reserve(engine, spec, paths, claim.enter_context(claims.Ticket(name)))
        own, before = placement.job_dir, last.placement.job_dir
        placement = dataclasses.replace(
            placement,
            revision=worktree.revision(code_folder(spec.command))(),
            # As on the cluster where the job has run: libraries keep this path in checkpoints.
            job_dir=before if Path(before).is_relative_to(own) else own,
        )
        wanted = _reopen(paths, spec, inventory, placement)
        return Prepared(spec, wanted, paths, engine, claim=claim.pop_all())


def _reopen(paths: JobPaths, spec: JobSpec, inventory: Inventory, placement: Placement) -> Plan:
    """Write the plan of the next generation; from then on, the job has not ended. Raises OrchestrateError."""
    name = paths.root.name
    try:
        with lock.held(paths, supervises=False):
            check(paths)  # again: another process may have resumed the job meanwhile
            record = launch.recorder(paths, hide=spec.mask())
            number = History(record.events).next
            wanted = plan(spec, inventory, placement, name, port(placement.network, number), number)
            records.reopen(paths.root, secrets.token_bytes(32))
            run_dir.keep(paths, wanted, spec)
            run_dir.keep_changes(spec, wanted, paths)
            record(JobResumed())
            record.close()
            records.drop(paths.page)
            records.remove(paths.report)  # from here on, the job has not ended
    except BlockingIOError:
        check(paths)
        hint = f"python -m orchestrate attach {name}"
        raise UsageError(f"another process resumes or removes {name}", hint) from None
    return wanted


def check(paths: JobPaths) -> Plan:
    """Return the plan of a job that can be resumed; raises UsageError for any other."""
    name, data = paths.root.name, run_dir.ended(paths)
    records.need(paths.root)
    if not data:
        state = f"is supervised by {supervisor}" if (supervisor := lock.supervisor(paths)) else "has no supervisor"
        raise UsageError(f"{name} has not ended: it {state}", f"python -m orchestrate attach {name}")
    if data["outcome"] == Outcome.SUCCEEDED:
        raise UsageError(f"{name} has succeeded", "start a new job; its script can load the checkpoints of this one")
    spec, last = run_dir.load(paths)
    if data["left_behind"] and (paths.cluster or removal.resources([registry.of_plan(spec, last)], name)):
        raise UsageError(f"not all nodes of {name} were removed", f"python -m orchestrate stop {name}")
    user, owner = users.nodes_of(spec.user), paths.shared.stat().st_uid
    if last.contained and user and user[0] != owner:  # who could not write to the job folder
        raise UsageError(
            f"the files of {name} belong to user {owner}, but its nodes would run as user {user[0]}",
            "resume it as it was started: with or without sudo",
        )
    return last
