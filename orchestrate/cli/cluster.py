"""Clusters: nodes that stay up between jobs. Below `runs/CLUSTER/`: its spec, its plan, and the folder that nodes see.

A job on a cluster writes to `nodes/JOB` there, which `runs/JOB/job` points to; when it ends, its folder takes the place
of that link. So a node never sees the files of an earlier job.
"""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass
from pathlib import Path

from orchestrate.console import say
from orchestrate.engines.base import SWARMS, Engine, Session
from orchestrate.engines.ports import port
from orchestrate.errors import OrchestrateError, UsageError
from orchestrate.files import lock
from orchestrate.files.paths import NODES, JobPaths
from orchestrate.job import store, users
from orchestrate.job.plan import Placement, Plan, counted, names, plan
from orchestrate.job.spec import JobSpec

# What a node is made with, and keeps.
SAME = ("image", "memory", "cpus", "shm_size", "network", "host_access", "grace", *SWARMS)


def _shown(spec: JobSpec, key: str) -> object:
    return "not set" if (value := getattr(spec, key)) is None else value


@dataclass(frozen=True)
class Cluster:
    """One cluster, by its files."""

    paths: JobPaths
    spec: JobSpec
    plan: Plan

    @property
    def name(self) -> str:
        """Its name, which begins the names of its containers."""
        return self.paths.root.name

    def differences(self, spec: JobSpec, wanted: Plan) -> list[str]:
        """What keeps a job from running here, in words."""
        found = [
            f"{key} is {_shown(self.spec, key)} there, {_shown(spec, key)} here"
            for key in SAME
            if getattr(self.spec, key) != getattr(spec, key)
        ]
        if self.plan.engine != wanted.engine:
            found.append(f"its nodes are on the engine {self.plan.engine}")
        if self.plan.placement.code != wanted.placement.code:
            found.append(f"its nodes see {self.plan.placement.code}, the job needs {wanted.placement.code}")
        if spec.trainers + spec.spares > self.spec.trainers + self.spec.spares:
            there = counted(self.spec.trainers + self.spec.spares, "trainer")
            found.append(f"it has {there}, not {spec.trainers + spec.spares}")
        if not set(wanted.gpus) <= set(self.plan.gpus):
            found.append(f"its nodes see {len(self.plan.gpus)} GPUs")
        if wanted.gpus and self.plan.engine == "swarm" and wanted.nproc_per_node > self.plan.nproc_per_node:
            found.append(f"its nodes have {self.plan.nproc_per_node} GPUs each")
        user, owner = users.nodes_of(spec), self.paths.nodes.lstat()  # root may have brought it up by sudo, or without
        if wanted.engine != "process" and user not in (None, (owner.st_uid, owner.st_gid)):
            found.append(f"its nodes run as user {owner.st_uid}, those of the job as {user[0]}")
        if job_there := self.user():
            found.append(f"{job_there} uses it")
        elif left := [paths for paths in self.jobs() if not store.ended(paths)]:  # its workers may still run
            name = left[0].root.name
            found.append(f"{name} has not ended there, and has no supervisor: attach to it, or stop it")
        return found

    def user(self) -> str:
        """The job that uses it now, or just `a job`, with its supervisor; empty if none does."""
        if supervisor := lock.holder(self.paths):
            return f"{self.busy_with() or 'a job'} ({supervisor})"
        return ""

    def busy_with(self) -> str:
        """The name of the job that is supervised on it; empty if there is none, or not yet."""
        return next((paths.root.name for paths in self.jobs() if lock.holder(paths)), "")

    def jobs(self) -> list[JobPaths]:
        """The jobs whose files are still among its own."""
        return store.on_cluster(self.paths.root.parent, self.name)

    def placement(self, own: Placement, job_id: str) -> Placement:
        """Where a job goes on this cluster, by where it would go with nodes of its own."""
        folder = own.job_dir if self.plan.engine == "process" else f"{own.job_dir}/{job_id}"
        sharing = len(names(self.spec, spares=True))
        return dataclasses.replace(own, cluster=self.name, job_dir=folder, sharing=sharing)


def found(runs: Path) -> list[Cluster]:
    """The clusters whose files are below `runs`."""
    clusters = []
    for folder in sorted(runs.glob(f"*/{NODES}")):
        paths = JobPaths(folder.parent)
        with contextlib.suppress(UsageError):  # half made, or half removed
            spec, plan = store.load(paths)
            if plan.placement.cluster == plan.job_id:
                clusters.append(Cluster(paths, spec, plan))
    return clusters


def elsewhere(engine: Engine, runs: Path) -> list[Cluster]:
    """The clusters of this account on an engine whose files are not below `runs`."""
    clusters = []
    for state in engine.jobs():
        if state.cluster and state.named and state.paths.root.parent != runs:
            with contextlib.suppress(UsageError):  # it is another account's
                clusters.append(Cluster(state.paths, *store.load(state.paths)))
    return clusters


def bring_up(engine: Engine, spec: JobSpec, runs: Path) -> tuple[Cluster, Session]:
    """Make a cluster, and have its nodes up; takes back what it has made where that fails."""
    name = store.new_id(spec)
    paths = JobPaths(runs / name)
    engine.prepare(spec)
    inventory, own = engine.inventory(spec, paths.nodes, look_inside=True)
    placement = dataclasses.replace(own, cluster=name, code=str(Path.cwd()))
    made = plan(spec, inventory, placement, name, port(placement.network, 0))
    store.create(spec, made, paths)
    cluster = Cluster(paths, spec, made)
    try:
        session = engine.open(spec, made, paths.nodes, warn=say)
        session.up(dataclasses.replace(made, nodes=names(spec, spares=True)))
    except BaseException:
        take_down(engine, cluster, 0)
        raise
    return cluster, session


def take_down(engine: Engine, cluster: Cluster, grace: float) -> None:
    """Remove a cluster's nodes and files; the files of its jobs stay.

    Raises OrchestrateError where a job has left something else in the place of its files.
    """
    engine.remove(cluster.name, grace)
    lost = ""
    for paths in cluster.jobs():
        try:
            store.bring_home(paths)
        except OSError as error:
            lost = lost or f"the files of {paths.root.name} are lost: {error.strerror}"
    store.remove(cluster.paths)
    if lost:
        raise OrchestrateError(f"{cluster.name} is down, but {lost}", "python -m orchestrate ps")
