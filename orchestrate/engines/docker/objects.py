"""Containers and networks of jobs on a Docker Engine, found by label."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

import docker.errors
from docker.models.containers import Container

from orchestrate.engines import sockets
from orchestrate.engines.base import JobState
from orchestrate.engines.docker import labels
from orchestrate.engines.docker.client import Daemon, name_of
from orchestrate.engines.docker.services import project
from orchestrate.host import records

SERVICE_GRACE = 5  # seconds for a service to end


def jobs(daemon: Daemon) -> list[JobState]:
    """List the jobs that have nodes."""
    return labels.jobs(daemon.containers(labels.JOB))


def nodes_of(daemon: Daemon, job_id: str) -> list[Container]:
    """Return the node containers of a job, running or not."""
    return [found for found in daemon.containers(f"{labels.JOB}={job_id}") if labels.node(found)]


def helpers_of(daemon: Daemon, job_id: str) -> list[Container]:
    """Return the helper containers of a job; a killed orchestrator leaves them behind."""
    containers = daemon.containers(f"{labels.GUARD}={job_id}")
    return [container for container in containers if labels.helps(container, labels.GUARD, job_id)]


def services_of(daemon: Daemon, job_id: str) -> list[Container]:
    """Return the containers of the services of a job."""
    found = daemon.containers(f"com.docker.compose.project={project(job_id)}")
    return [each for each in found if (each.attrs.get("Labels") or {}).get(labels.SERVICES) == job_id]


def remove_services(daemon: Daemon, job_id: str) -> None:
    """Remove the services of a job, with their networks and volumes; external ones are kept."""
    containers, label = services_of(daemon, job_id), {"label": f"com.docker.compose.project={project(job_id)}"}
    daemon.each(containers, lambda service: service.stop(timeout=SERVICE_GRACE))
    daemon.each(containers, lambda service: service.remove(force=True, v=True))
    with daemon.translating_errors(f"could not remove the services of {job_id}"):
        for network in daemon.client.networks.list(filters=label):
            with contextlib.suppress(docker.errors.APIError):  # in use by another container, as is a volume
                network.remove()
        for volume in daemon.client.volumes.list(filters=label):
            with contextlib.suppress(docker.errors.APIError):
                volume.remove()


def resources(daemon: Daemon, job_id: str) -> list[str]:
    """Describe the containers and networks of a job."""
    label = f"{labels.JOB}={job_id}"
    with daemon.translating_errors("could not list its networks"):
        networks = [
            f"network {network.name}"
            for network in daemon.client.networks.list(filters={"label": label, "driver": "bridge"})
        ]
    containers = nodes_of(daemon, job_id) + helpers_of(daemon, job_id) + services_of(daemon, job_id)
    return sorted(f"container {name_of(container)}" for container in containers) + networks


def remove(daemon: Daemon, job_id: str, grace: float, folders: Iterable[Path] = ()) -> None:
    """Stop and remove the containers and networks of a job, and nothing else.

    `folders` are socket folders besides those found by label; nodes get `grace` seconds to end.
    """
    nodes = nodes_of(daemon, job_id)
    if grace:
        daemon.each(nodes, lambda node: node.stop(timeout=int(grace)))
    nodes += helpers_of(daemon, job_id)
    daemon.each(nodes, lambda node: node.remove(force=True, v=True))
    with daemon.translating_errors(f"could not remove a network of {job_id}"):
        networks = daemon.client.networks.list(filters={"label": f"{labels.JOB}={job_id}", "driver": "bridge"})
        for network in networks:
            network.remove()
    found = [labels.job(item.attrs["Labels"], "docker") for item in (*nodes, *networks)]
    named = {job.paths.sockets for job in found if job and job.named and job.job_id == job_id}
    for folder in named | {*folders}:
        if not records.replaced(folder.parent):
            sockets.unshare(folder)
