"""Containers and networks of jobs on a Docker Engine, found by label."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from orchestrate.engines import sockets
from orchestrate.engines.base import JobState
from orchestrate.engines.docker import labels
from orchestrate.engines.docker.api import Container, Refused
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
    containers, label = services_of(daemon, job_id), [f"com.docker.compose.project={project(job_id)}"]
    daemon.each(containers, lambda service: service.stop(timeout=SERVICE_GRACE))
    daemon.each(containers, Container.remove)
    with daemon.translating_errors(f"could not remove the services of {job_id}"):
        volumes = daemon.api.get("/volumes", filters={"label": label})["Volumes"] or ()
        paths = [f"/networks/{network['Id']}" for network in daemon.networks(label=label)]
        for path in [*paths, *(f"/volumes/{volume['Name']}" for volume in volumes)]:
            with contextlib.suppress(Refused):  # in use by another container
                daemon.api.delete(path)


def resources(daemon: Daemon, job_id: str) -> list[str]:
    """Describe the containers and networks of a job."""
    with daemon.translating_errors("could not list its networks"):
        networks = [f"network {network['Name']}" for network in _networks_of(daemon, job_id)]
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
    daemon.each(nodes, Container.remove)
    with daemon.translating_errors(f"could not remove a network of {job_id}"):
        networks = _networks_of(daemon, job_id)
        for network in networks:
            daemon.api.delete(f"/networks/{network['Id']}")
    found = [labels.job(attrs["Labels"], "docker") for attrs in (*(node.attrs for node in nodes), *networks)]
    named = {job.paths.sockets for job in found if job and job.named and job.job_id == job_id}
    for folder in named | {*folders}:
        if not records.replaced(folder.parent):
            sockets.unshare(folder)


def _networks_of(daemon: Daemon, job_id: str) -> list[dict[str, Any]]:
    return daemon.networks(label=[f"{labels.JOB}={job_id}"], driver=["bridge"])
