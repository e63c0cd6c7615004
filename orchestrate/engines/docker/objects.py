"""What jobs have on a Docker Engine: containers and networks, which their labels tell."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from docker.models.containers import Container

from orchestrate.engines import sockets
from orchestrate.engines.base import JobState
from orchestrate.engines.docker import labels
from orchestrate.engines.docker.client import Daemon, name_of


def jobs(daemon: Daemon) -> list[JobState]:
    """The jobs that have nodes."""
    nodes = [job for container in daemon.containers(labels.JOB) if (job := labels.node_job(container))]
    count, found = Counter(job.job_id for job in nodes), {job.job_id: job for job in reversed(nodes)}
    return [dataclasses.replace(found[name], nodes=count[name]) for name in sorted(found)]


def nodes_of(daemon: Daemon, job_id: str) -> list[Container]:
    """The containers that are nodes of a job, running or not."""
    return [found for found in daemon.containers(f"{labels.JOB}={job_id}") if labels.node(found)]


def helpers_of(daemon: Daemon, job_id: str) -> list[Container]:
    """The containers that help the nodes of a job; an orchestrator that was killed leaves them."""
    found = daemon.containers(f"{labels.GUARD}={job_id}")
    return [one for one in found if labels.helps(one, labels.GUARD, job_id)]


def holds(daemon: Daemon, job_id: str) -> list[str]:
    """Containers and networks of a job, in words."""
    label = f"{labels.JOB}={job_id}"
    with daemon.asking("could not list its networks"):
        networks = [
            f"network {network.name}"
            for network in daemon.client.networks.list(filters={"label": label, "driver": "bridge"})
        ]
    containers = nodes_of(daemon, job_id) + helpers_of(daemon, job_id)
    return sorted(f"container {name_of(container)}" for container in containers) + networks


def remove(daemon: Daemon, job_id: str, grace: float, folders: Iterable[Path] = ()) -> None:
    """Stop and remove the containers and networks of a job, and nothing else.

    `folders` are folders of the job's sockets, besides those that labels tell; nodes have `grace` seconds to end.
    """
    nodes = nodes_of(daemon, job_id)
    if grace:
        daemon.each(nodes, lambda node: node.stop(timeout=int(grace)))
    nodes += helpers_of(daemon, job_id)
    daemon.each(nodes, lambda node: node.remove(force=True, v=True))
    with daemon.asking(f"could not remove a network of {job_id}"):
        networks = daemon.client.networks.list(filters={"label": f"{labels.JOB}={job_id}", "driver": "bridge"})
        for network in networks:
            network.remove()
    found = [labels.job(thing.attrs["Labels"], "docker") for thing in (*nodes, *networks)]
    named = {job.paths.sockets for job in found if job and job.named and job.job_id == job_id}
    for folder in named | {*folders}:
        sockets.unshare(folder)
