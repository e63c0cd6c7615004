"""Labels that identify all objects of a job in an engine.

Labels are untrusted: a container inherits the labels of its image, and containers of other users can have any. So an
object belongs to a job only if all of its labels are valid and it has the name that we chose, which no image can set.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from orchestrate.engines.base import JobState
from orchestrate.files.paths import NAME, is_text

JOB, RUN, OWNER = "orchestrate.job", "orchestrate.run", "orchestrate.owner"  # of nodes, networks, services, secrets
ROLE = "orchestrate.role"  # of containers of a service: master or trainer
GUARD, RELAY = "orchestrate.guard", "orchestrate.relay"  # of helper containers
LOOK = "orchestrate.look"  # of containers that look into an image: the user id of the account
SERVICES = "orchestrate.services"  # of containers of the user's own Compose file
ROLES = ("master", "trainer")
LOOK_NAME = re.compile("orchestrate-look-[0-9a-f]{16}")
_COMPOSE = "com.docker.compose."


class Container(Protocol):
    """A container, as the engine lists it."""

    attrs: Any  # as in the engine's API


def only(labels: Mapping[str, str]) -> dict[str, str]:
    """Return labels for a container; all our other labels are set to empty, so that an image cannot set them."""
    return dict.fromkeys((JOB, RUN, OWNER, ROLE, GUARD, RELAY, LOOK, SERVICES), "") | dict(labels)


def job(labels: Mapping[str, str], engine: str) -> JobState | None:
    """Return the job of an object with these labels, without the number of nodes; None for other objects."""
    name, run, owner = (labels.get(key, "") for key in (JOB, RUN, OWNER))
    if not NAME.fullmatch(name) or not re.fullmatch("[0-9]{1,10}", owner) or not run.startswith("/"):
        return None
    return JobState(name, engine, 0, Path(run), int(owner)) if is_text(run) else None


def node(container: Container) -> str:
    """Return the name of the node in a container: `master`, or `trainer-2` for the second trainer of Compose.

    Empty if the container is not a node of the job in its label.
    """
    labels = _labels(container)
    found = job(labels, "docker")
    project, service, number = (labels.get(_COMPOSE + key, "") for key in ("project", "service", "container-number"))
    if not found or project != found.job_id or service not in ROLES or not re.fullmatch("[1-9][0-9]{0,5}", number):
        return ""
    if f"{found.job_id}-{service}-{number}" not in _names(container):
        return ""
    return service if service == "master" else f"{service}-{number}"


def jobs(containers: Iterable[Container]) -> list[JobState]:
    """Return the jobs that have nodes among these containers."""
    nodes = [found for container in containers if (found := node_job(container))]
    count, known = Counter(found.job_id for found in nodes), {found.job_id: found for found in reversed(nodes)}
    return [dataclasses.replace(known[name], nodes=count[name]) for name in sorted(known)]


def service_jobs(services: Iterable[Mapping[str, Any]], tasks: Iterable[Mapping[str, Any]]) -> list[JobState]:
    """Return the jobs that have nodes among these services of a Swarm and their tasks."""
    nodes = Counter(task["ServiceID"] for task in tasks if task["DesiredState"] == "running")
    known: dict[str, JobState] = {}
    for service in services:
        if found := service_job(service):
            count = nodes[service["ID"]] + (known[found.job_id].nodes if found.job_id in known else 0)
            known[found.job_id] = dataclasses.replace(found, nodes=count)
    return [known[name] for name in sorted(known)]


def node_job(container: Container) -> JobState | None:
    """Return the job of a node, without the number of nodes; None for other containers."""
    return job(_labels(container), "docker") if node(container) else None


def service_job(service: Mapping[str, Any]) -> JobState | None:
    """Return the job of a Swarm service, without the number of nodes; None for other services."""
    found = job(service["Spec"].get("Labels") or {}, "swarm")
    return found if found and service["Spec"]["Name"] in [f"{found.job_id}-{role}" for role in ROLES] else None


def task_node(task: Mapping[str, Any]) -> str:
    """Return the name of the node in a Swarm task; empty for other tasks."""
    role = (task["Spec"].get("ContainerSpec", {}).get("Labels") or {}).get(ROLE, "")
    if role not in ROLES or "Slot" not in task:
        return ""
    return str(role) if role == "master" else f"{role}-{task['Slot']}"


def helper_name(kind: str, job_id: str, suffix: str = "") -> str:
    """Return the name of a helper of the given kind, GUARD or RELAY, with a suffix if a job has several."""
    return "-".join(filter(None, (job_id, kind.rpartition(".")[2], suffix)))


def helps(container: Container, kind: str, job_id: str) -> bool:
    """Whether a container is a helper of a job, of the given kind."""
    name = helper_name(kind, job_id)
    return _labels(container).get(kind) == job_id and any(
        found == name or found.startswith(f"{name}-") for found in _names(container)
    )


def looks(container: Container, owner: int) -> bool:
    """Whether a container was to look into an image, for an account."""
    return _labels(container).get(LOOK) == str(owner) and any(map(LOOK_NAME.fullmatch, _names(container)))


def _labels(container: Container) -> dict[str, str]:
    return container.attrs.get("Labels") or {}


def _names(container: Container) -> list[str]:
    return [name.removeprefix("/") for name in container.attrs.get("Names") or []]
