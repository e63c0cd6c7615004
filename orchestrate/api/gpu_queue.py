"""What this machine offers to a job, once it is the job's: without `queue` at once, otherwise once enough is free."""

from __future__ import annotations

import dataclasses
import time

from orchestrate.console import print_message
from orchestrate.engines.base import Engine
from orchestrate.errors import ResourceError
from orchestrate.host import claims
from orchestrate.host.gpus import Busy
from orchestrate.plan.plan import Inventory, Placement, plan
from orchestrate.record.paths import JobPaths
from orchestrate.spec.spec import JobSpec

INTERVAL = 0.5  # seconds between two looks at the claims of other jobs
LOOK_AGAIN = 15.0  # seconds after which the GPUs are looked at again: other programs make no claims


def reserve(engine: Engine, spec: JobSpec, paths: JobPaths, claim: claims.Ticket) -> tuple[Inventory, Placement]:
    """Return what an engine offers to a job, after claiming the GPUs among it; raises OrchestrateError.

    A job in the queue waits until enough GPUs, or with `pin` the cores, are free, and prints for what and for whom.
    """
    last = ""
    while True:
        known = claims.users(claim.job) if spec.gpus != "none" or spec.pin else {}
        held: tuple[str, ...] = ()
        try:
            inventory, placement = engine.inventory(spec, paths.shared, run_image=True)
            gpus = plan(spec, inventory, placement, claim.job, 0).gpus if inventory.gpus else ()
            among = claims.needs(inventory.engine, gpus, spec.pin)
            if claim.take(among, known, spec.queue):
                _report(claim, spec)
                _notice(claim, spec, among)
                return inventory, placement
            count = len(among)
        except Busy as busy:
            among, count, held = busy.among, busy.count, busy.users
            if not claim.waits:
                _check(engine, spec, paths)
        if spec.queue:
            claim.enqueue(among, count)
            _report(claim, spec)
            last = _wait(claim, among, count, held, last)


def _check(engine: Engine, spec: JobSpec, paths: JobPaths) -> None:
    """Raise ResourceError for a job that could not run either once nothing is in use."""
    asked = dataclasses.replace(spec, queue=False, gpus="all" if spec.gpus == "auto" else spec.gpus)
    try:
        plan(asked, *engine.inventory(asked, paths.shared, run_image=False), paths.root.name, 0)
    except ResourceError as error:
        if "--queue" in error.hint:  # it would wait forever
            error.hint = "use fewer nodes or workers, or --gpus none"
        raise


def _report(claim: claims.Ticket, spec: JobSpec) -> None:
    """Print why GPUs cannot be claimed, if so; raises ResourceError for a job that waits for them."""
    if claim.problem and spec.queue:
        raise ResourceError(f"cannot wait for GPUs: {claim.problem}", "check that folder, or run without --queue")
    if claim.problem:
        print_message(f"warning: other jobs may get the same GPUs, since they cannot be claimed: {claim.problem}")


def _notice(claim: claims.Ticket, spec: JobSpec, among: tuple[str, ...]) -> None:
    """Print that a job passes others that wait for the same, or that it has nothing to wait for."""
    if spec.queue and not among and spec.gpus != "none":
        print_message("--queue has no effect: the job uses no GPUs of this machine, and pins no workers to cores")
    if not among or spec.queue:
        return
    if waiting := [each for each in claims.found() if not {*among}.isdisjoint(each.among)]:
        print_message(f"warning: this job passes {', '.join(map(str, waiting))} in the queue; --queue waits in turn")


def _wait(claim: claims.Ticket, among: tuple[str, ...], count: int, held: tuple[str, ...], last: str) -> str:
    """Wait until it may be a job's turn: no job is ahead, and what other jobs use has changed, or some time has passed.

    `held` are the users of what it waits for, as far as known. Prints a message, unless it is the last one; returns it.
    """
    seen, until = claims.users(claim.job), time.monotonic() + LOOK_AGAIN
    while (ahead := claim.ahead(among)) or (claims.users(claim.job) == seen and time.monotonic() < until):
        if ahead:  # look again once they are not
            until = 0.0
        users = held or tuple(dict.fromkeys(str(seen[each]) for each in among if each in seen))
        where = f"behind {', '.join(map(str, ahead))}" if ahead else f"in use by {', '.join(users)}" if users else ""
        if where and last != (last := f"{claim.job} waits for {claims.wanted(among, count)}, {where}"):
            print_message(last)
        time.sleep(INTERVAL)
    return last
