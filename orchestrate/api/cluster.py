"""Clusters: nodes that stay up between jobs. `runs/CLUSTER/` has the spec, the plan, and the folder that nodes see.

A job on a cluster writes to `runs/CLUSTER/nodes/JOB`, and `runs/JOB/job` is a link to it. When the job ends, the folder
replaces the link, so a node never sees the files of an earlier job.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Iterator
from pathlib import Path

from orchestrate.console import phase, print_message
from orchestrate.dataclass import dataclass
from orchestrate.engines.base import SWARMS, Engine, Session
from orchestrate.engines.ports import port
from orchestrate.errors import OrchestrateError, UsageError
from orchestrate.files.folder import content
from orchestrate.files.paths import NODES
from orchestrate.host import records, users
from orchestrate.host.processes import myself, named
from orchestrate.plan.plan import Inventory, Placement, Plan, names, plan, pluralize
from orchestrate.record import lock, run_dir
from orchestrate.record.paths import JobPaths
from orchestrate.spec.spec import JobSpec
from orchestrate.supervise import open_stores

# Settings that a node keeps from its creation, so that a job must have the same.
FIXED_KEYS = (
    *("image", "dockerfile", "pip", "data", "mounts", "labels", "ports"),
    *("memory", "cpus", "shm_size", "network", "isolated", "host_access", "grace", *SWARMS),
)

ABANDONED_AFTER = 60.0  # seconds after the end of the nodes of a cluster
IMPORT_TIMEOUT = 120.0  # seconds for the nodes of a cluster to import packages; torch takes 2 to 20


def _shown(spec: JobSpec, key: str) -> object:
    return "not set" if (value := getattr(spec, key)) is None else value


@dataclass(frozen=True)
class Cluster:
    """A cluster, as its files describe it."""

    paths: JobPaths
    spec: JobSpec
    plan: Plan

    @property
    def name(self) -> str:
        """The name, which is also the prefix of the names of its containers."""
        return self.paths.root.name

    def differences(self, spec: JobSpec, wanted: Plan) -> list[str]:
        """Return the reasons why a job cannot run on this cluster, as text; empty if it can."""
        reasons = [
            f"{key} is {_shown(self.spec, key)} on the cluster, {_shown(spec, key)} in the job"
            for key in FIXED_KEYS
            if getattr(self.spec, key) != getattr(spec, key)
        ]
        if self.plan.engine != wanted.engine:
            reasons.append(f"its engine is {self.plan.engine}, the job needs {wanted.engine}")
        if self.plan.placement.image != wanted.placement.image and self.plan.engine == wanted.engine:
            reasons.append("its image has been built again")
        if self.plan.placement.code != wanted.placement.code:
            reasons.append(f"its code folder is {self.plan.placement.code}, the job needs {wanted.placement.code}")
        if spec.trainers + spec.spares > self.spec.trainers + self.spec.spares:
            trainers = pluralize(self.spec.trainers + self.spec.spares, "trainer")
            reasons.append(f"it has {trainers}, the job needs {spec.trainers + spec.spares}")
        if not set(wanted.gpus) <= set(self.plan.gpus):
            reasons.append(f"its nodes can access only {pluralize(len(self.plan.gpus), 'GPU')}")
        if wanted.gpus and self.plan.engine == "swarm" and wanted.nproc_per_node > self.plan.nproc_per_node:
            reasons.append(f"its nodes have {self.plan.nproc_per_node} GPUs each")
        owner = self.paths.nodes.lstat()  # root may have started it with or without sudo
        user = users.nodes_of(spec.user)
        if wanted.engine != "process" and user not in (None, (owner.st_uid, owner.st_gid)):
            reasons.append(f"its nodes run as user {owner.st_uid}, the job needs {user[0]}")
        if user_job := self.user():
            reasons.append(f"it is in use by {user_job}")
        elif jobs := self.jobs():
            running = [paths for paths in jobs if not run_dir.ended(paths)]  # its workers may still run
            left = (run_dir.ended(jobs[0]) or {}).get("left_behind")
            how = f"`stop {jobs[0].root.name}` copies from its nodes" if left else "`down` moves out of it"
            reasons.append(
                f"it is in use by {running[0].root.name}, which has no supervisor: attach to it or stop it"
                if running
                else f"it still has the files of {jobs[0].root.name}, which {how}"
            )
        return reasons

    def user(self) -> str:
        """Return the job that uses the cluster, or `a job` if unknown, with its supervisor; empty if it is idle."""
        if supervisor := lock.supervisor(self.paths):
            return f"{self.busy_with() or 'a job'} ({supervisor})"
        return ""

    def busy_with(self) -> str:
        """Return the name of the job that is supervised on it; empty if there is none, or not yet."""
        return next((paths.root.name for paths in self.jobs() if lock.supervisor(paths)), "")

    @property
    def private(self) -> bool:
        """Whether only the program that has started it uses it."""
        return self.paths.private.exists()

    def take(self, held: contextlib.ExitStack) -> bool:
        """Lock the cluster for a job until `held` exits; return False if another process has just used or removed it.

        Until then, `user` would release the lock: closing its file does.
        """
        try:
            held.enter_context(lock.held(self.paths))
        except (BlockingIOError, FileNotFoundError):
            return False
        return self.paths.nodes.is_dir() and not self.jobs()

    def jobs(self) -> list[JobPaths]:
        """Return the jobs whose files are still in the cluster's folder."""
        return run_dir.on_cluster(self.paths.root.parent, self.name)

    def placement(self, own: Placement, job_id: str) -> Placement:
        """Return a job's placement on this cluster; `own` is its placement on nodes of its own."""
        folder = own.job_dir if self.plan.engine == "process" else f"{own.job_dir}/{job_id}"
        sharing = len(names(self.spec, spares=True))
        keep = self.plan.placement.keep
        return dataclasses.replace(own, cluster=self.name, job_dir=folder, sharing=sharing, keep=keep)

    def seconds_left(self) -> float | None:
        """Return for how long its nodes stay up without a job; None if that is not limited. Negative: they are gone."""
        if not (keep := self.plan.placement.keep):
            return None
        return keep - (time.time() - self.paths.nodes.stat().st_mtime)  # the end of the last job changes the folder

    @property
    def abandoned(self) -> bool:
        """Whether its nodes have ended by themselves, and nothing will remove it: its program was killed."""
        try:
            left = self.seconds_left()
            if left is None or left > -ABANDONED_AFTER:
                return False
            return self.orphaned if self.private else not (self.user() or self.jobs())
        except (OSError, ValueError):
            return False

    @property
    def orphaned(self) -> bool:
        """Whether the program that has started it for itself was killed."""
        try:
            program = content(self.paths.private)
        except (OSError, ValueError):
            return False
        return bool(program) and not named(program) and not self.user()


def found(runs: Path) -> list[Cluster]:
    """Return the clusters whose files are in `runs`."""
    clusters = []
    for folder in sorted(runs.glob(f"*/{NODES}")):
        paths = JobPaths(folder.parent)
        with contextlib.suppress(UsageError):  # partly created or removed
            spec, plan = run_dir.load(paths)
            if plan.placement.cluster == plan.job_id:
                clusters.append(Cluster(paths, spec, plan))
    return clusters


def elsewhere(engine: Engine, runs: Path) -> list[Cluster]:
    """Return this account's clusters on an engine whose files are not in `runs`."""
    clusters = []
    for state in engine.jobs():
        if state.cluster and state.named and state.paths.root.parent != runs:
            with contextlib.suppress(UsageError):  # another account's
                clusters.append(Cluster(state.paths, *run_dir.load(state.paths)))
    return clusters


def remove_abandoned(engine: Engine, clusters: list[Cluster]) -> list[Cluster]:
    """Remove those of the engine that killed programs have left, since each holds a network; return the others."""
    kept = []
    for each in clusters:
        if each.plan.engine == engine.name and each.abandoned:
            with contextlib.suppress(OrchestrateError):
                remove_left(engine, each)
        else:
            kept.append(each)
    return kept


def remove_left(engine: Engine, cluster: Cluster) -> None:
    """Remove a cluster that a killed program has left, and say so; raises OrchestrateError like `take_down`."""
    take_down(engine, cluster, 0)
    print_message(f"{cluster.name} removed, which a killed program had left")


def bring_up(
    engine: Engine,
    spec: JobSpec,
    runs: Path,
    held: contextlib.ExitStack,
    code: Path | None = None,
    gpus: Inventory | None = None,
) -> tuple[Cluster, Session]:
    """Create a cluster for jobs in a code folder (default: the current one) and start its nodes.

    Its GPUs are those of the inventory `gpus`, if given, which a job has claimed.
    No other process uses it before `held` exits. Removes everything again on failure.
    """
    paths = run_dir.new_paths(spec, runs)
    name = paths.root.name
    engine.prepare(spec, paths.nodes)
    asked = dataclasses.replace(spec, queue=False, gpus="none" if gpus else spec.gpus)
    inventory, own = engine.inventory(asked, paths.nodes, run_image=True)
    if gpus:
        fields = ("gpus", "no_gpus", "gpu_note", "gpu_cores")
        inventory = dataclasses.replace(inventory, **{name: getattr(gpus, name) for name in fields})
    placement = dataclasses.replace(own, cluster=name, code=str(code or Path.cwd()), keep=spec.keep or 0.0)
    cluster_plan = plan(spec, inventory, placement, name, port(placement.network, 0))
    warn_of_crowd(cluster_plan)
    run_dir.create(spec, cluster_plan, paths, held)
    cluster = Cluster(paths, spec, cluster_plan)
    try:
        session = engine.open(spec, cluster_plan, paths.nodes, warn=print_message)
        session.up(dataclasses.replace(cluster_plan, nodes=names(spec, spares=True)))
    except BaseException:
        take_down(engine, cluster, 0)
        raise
    return cluster, session


def start(engine: Engine, spec: JobSpec, runs: Path, private: bool = False) -> tuple[Cluster, bool]:
    """Create a cluster as `bring_up`; also return whether its nodes have imported what jobs need, in time."""
    if spec.engine == "slurm":
        raise UsageError("nodes of Slurm do not stay up after a job", "run a job: its nodes start in its allocation")
    open_stores.prepare(spec)
    if private:
        remove_abandoned(engine, found(runs) + elsewhere(engine, runs))
    phase(f"starting {pluralize(spec.trainers + 1 + spec.spares, 'node')}")
    with contextlib.ExitStack() as held:
        created, session = bring_up(engine, dataclasses.replace(spec, name=spec.name or "cluster"), runs, held)
        if private:
            records.put(created.paths.private, myself())
    packages, warm = ", ".join(created.plan.placement.packages), True
    if packages:
        phase(f"importing {packages} in {pluralize(len(created.plan.nodes), 'node')}")
        try:
            warm = session.wait_until_warm(created.plan.nodes, IMPORT_TIMEOUT)
        except BaseException:  # Ctrl-C
            take_down(engine, created, 0)
            raise
    phase("")
    return created, warm


def warn_of_crowd(plan: Plan) -> None:
    """Print a warning if a plan has too many workers per core."""
    if plan.is_crowded:
        counts = f"{plan.world_size} workers on {pluralize(len(plan.inventory.cores), 'core')}"
        print_message(f"warning: {counts}: with torch, each node takes 200 MiB of memory or more")


def keep(
    engine: Engine,
    spec: JobSpec,
    runs: Path,
    inventory: Inventory,
    own: Placement,
    job_id: str,
    held: contextlib.ExitStack,
) -> Placement:
    """Start nodes that stay up for `spec.keep` seconds after a job, and return the job's placement on them.

    No other process uses them before `held` exits.
    """
    shared = dataclasses.replace(spec, name="kept", env={}, secrets={}, contents={})
    created, _ = bring_up(engine, shared, runs, held, Path(own.code), inventory)
    return created.placement(own, job_id)


def remove_kept(engine: Engine, runs: Path) -> None:
    """Remove idle nodes that were kept after a job: another job starts its own, and may need their memory."""
    for each in found(runs):
        idle = each.plan.engine == engine.name and not each.private and not each.user() and not each.jobs()
        if each.plan.placement.keep and idle:
            with contextlib.suppress(InUse):  # now
                take_down(engine, each, 0)


class InUse(UsageError):
    """A cluster that another process uses, or has just removed."""


@contextlib.contextmanager
def locked(paths: JobPaths) -> Iterator[None]:
    """Lock a cluster during a `with` block; raises InUse."""
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(lock.held(paths, supervises=False))
        except (BlockingIOError, FileNotFoundError):
            raise InUse(f"{paths.root.name} is in use by another process", "python -m orchestrate ps") from None
        yield


def take_down(engine: Engine, cluster: Cluster, grace: float) -> None:
    """Remove a cluster's nodes and files; job files are kept.

    Raises InUse if it is, OrchestrateError if a job has replaced its folder by something else, or if a folder cannot be
    moved.
    """
    with locked(cluster.paths):
        for job in cluster.jobs():
            if lock.supervisor(job):  # it is about to take the cluster
                name = job.root.name
                raise InUse(f"{cluster.name} is in use by {name}", f"python -m orchestrate stop {name}")
        _remove(engine, cluster, grace)


def _remove(engine: Engine, cluster: Cluster, grace: float) -> None:
    engine.remove(cluster.name, grace)
    lost, stuck = "", ""
    for paths in run_dir.linked(cluster.paths.root.parent, cluster.name):
        if not records.find(paths.root) and not os.path.lexists(paths.folder.path):
            continue  # a link of a project
        try:
            run_dir.move_from_cluster(paths)
        except OSError as error:
            if paths.cluster:  # they are still in its folder
                stuck = stuck or f"cannot move {paths.folder.path} to {paths.root}: {error.strerror}"
            else:
                lost = lost or f"the files of {paths.root.name} are lost: {error.strerror}"
    if stuck:
        hint = f"check who owns both, or remove one; then: python -m orchestrate down {cluster.name}"
        raise OrchestrateError(stuck, hint)
    records.drop(cluster.paths.plan)  # without one, `down` finishes this if it is interrupted
    run_dir.remove(cluster.paths)
    if lost:
        raise OrchestrateError(f"{cluster.name} was removed, but {lost}", "python -m orchestrate ps")
