"""The end of a job on request, also of one without a supervisor."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from orchestrate.api import removal
from orchestrate.clock import SYSTEM, Clock
from orchestrate.console import print_message
from orchestrate.engines import registry
from orchestrate.errors import OrchestrateError
from orchestrate.record import lock, run_dir
from orchestrate.record.logs import rest
from orchestrate.record.paths import JobPaths
from orchestrate.show.feed import Feed
from orchestrate.show.screen import Display
from orchestrate.spec.spec import JobSpec
from orchestrate.supervise import launch

if TYPE_CHECKING:
    from orchestrate.engines.base import Engine


MAX_STOP_ATTEMPTS = 20  # attempts, 0.1 s apart, to verify the supervisor that holds a lock: it may be starting
Stops = Callable[[], int]  # returns the number of requests to stop so far, by signals


def stop(
    paths: JobPaths,
    engines: list[Engine],
    clock: Clock = SYSTEM,
    count: Callable[[JobSpec], Stops] = lambda spec: lambda: 0,
) -> bool:
    """Stop a job, and verify that nothing of it is left; return whether it was still running, or its nodes were there.

    `count` begins to count requests to hurry. Raises OrchestrateError if something is left.
    """
    name = paths.root.name
    resources, data = removal.resources(engines, name), run_dir.ended(paths)
    left = data and data["left_behind"] and paths.cluster  # its files are still on nodes of a cluster
    if data and not left and not resources and not lock.supervisor(paths):
        return False
    waited = ask(paths, clock)
    resources = removal.resources(engines, name)
    if resources or left or os.path.lexists(paths.root) and not run_dir.ended(paths):  # else `rm` has removed it
        if not waited:  # a job in Slurm's queue has no nodes
            print_message(f"{name} has no supervisor: removing its nodes")
        try:
            _stop_unsupervised(paths, resources, count)
        except BlockingIOError:  # it has one again
            return stop(paths, engines, clock, count)
    if remaining := [resource for _, resource in removal.resources(engines, name)]:
        what = f"could not remove {', '.join(remaining)} of {name}"
        raise OrchestrateError(what, f"python -m orchestrate stop {name}")
    return True


def ask(paths: JobPaths, clock: Clock = SYSTEM) -> bool:
    """Ask a job's supervisor to stop it; once it has none, return whether it was only in a queue."""
    attempts, waited = 0, False
    while supervisor := lock.supervisor(paths):
        waited = supervisor.waits()
        if not supervisor.ask_to_stop():  # it is just starting or exiting
            attempts += 1
            if attempts > MAX_STOP_ATTEMPTS:
                other = f"; or end process {pid}, which has locked it" if (pid := lock.locker(paths)) else ""
                raise OrchestrateError(
                    f"{paths.lock} is locked by a process that cannot be verified as its supervisor",
                    "wait for other commands on this job, such as rm; or run stop in the same container, "
                    f"as the same user, as the job was started{other}",
                )
            clock.sleep(0.1)
            continue
        print_message(f"canceling {supervisor}" if waited else f"asking the supervisor of {paths.root.name} to stop")
        while lock.supervisor(paths) == supervisor:
            clock.sleep(0.1)
    return waited


def _stop_unsupervised(paths: JobPaths, resources: list[tuple[Engine, str]], count: Callable[[JobSpec], Stops]) -> None:
    """Stop a job whose supervisor is gone, and write its report; remove its nodes if that fails.

    Raises OrchestrateError if nodes still have files that cannot be copied to the run directory, or are those of a
    cluster, and BlockingIOError if the job has a supervisor.
    """
    try:
        spec, plan = run_dir.load(paths)
        engine = registry.of_plan(spec, plan)
        more = count(spec)
        feed = Feed(paths, spec, plan, Display(print_message), rest(paths, spec, plan, last=0))  # only what comes
        data = launch.supervise(paths, engine, lambda: 1 + more(), feed)
    except BlockingIOError:
        raise
    except (OrchestrateError, OSError) as error:  # a file of it is damaged, or was replaced
        if paths.cluster:
            hint = f"python -m orchestrate down {paths.cluster} removes its nodes, and what runs on them"
            raise OrchestrateError(f"could not stop {paths.root.name}: {error}", hint) from None
        return removal.remove(paths, resources)
    if why := data["left_behind"]:
        name, cluster = paths.root.name, paths.cluster
        other = f"down {cluster}" if cluster else f"rm {name}"
        hint = f"fix the problem and run stop again, or remove what is left: python -m orchestrate {other}"
        raise OrchestrateError(f"could not remove all nodes of {name}: {why}", hint)
