"""Access to Docker Swarm: its hosts, and the tasks and other objects of jobs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from orchestrate.clock import SYSTEM, Clock
from orchestrate.engines.base import JobState
from orchestrate.engines.docker import labels
from orchestrate.engines.docker.client import Daemon, name_of
from orchestrate.engines.swarm import service_spec
from orchestrate.errors import EngineError, EngineLost, ResourceError
from orchestrate.plan.plan import pluralize
from orchestrate.spec.spec import JobSpec

NETWORK_RELEASE_TIMEOUT = 20.0  # seconds for Swarm to release a network whose tasks have ended
NO_MANAGER = "run orchestrate on a manager of the Swarm, or create a Swarm: docker swarm init"
COMING = ("new", "pending", "assigned", "accepted", "preparing", "ready", "starting")  # states of a task
ENDED = ("complete", "shutdown", "failed", "rejected", "remove", "orphaned")
ApiObject = dict[str, Any]  # a host or a task, as in the Engine's API


class Manager:
    """The Swarm manager that the user's `docker` command uses."""

    def __init__(self, clock: Clock = SYSTEM) -> None:
        """Connect; raises EngineError if the engine is not a manager."""
        self.clock = clock  # also of sessions
        self.daemon = Daemon()
        self.client, self.api = self.daemon.client, self.daemon.client.api
        self.info: ApiObject = self.daemon.info
        swarm = self.info.get("Swarm", {})
        if not swarm.get("ControlAvailable"):
            state = "not a Swarm manager" if swarm.get("LocalNodeState") == "active" else "not part of a Swarm"
            raise EngineError(f"the engine at {self.daemon.host} is {state}", NO_MANAGER)
        self.address = str(swarm["NodeAddr"])  # of this host, for other hosts
        self.known: dict[str, ApiObject] = {}  # hosts by id, when last listed

    def hosts(self) -> dict[str, ApiObject]:
        """List the hosts again; return them by id."""
        with self.daemon.translating_errors("could not list its hosts"):
            self.known = {host["ID"]: host for host in self.api.nodes()}
        return self.known

    def candidate_hosts(self, spec: JobSpec) -> list[ApiObject]:
        """Return the hosts that accept a job's nodes; raises ResourceError if none is ready."""
        hosts = [host for host in self.hosts().values() if ready(host)]
        if not hosts:
            raise ResourceError("no host of the Swarm is ready", "see docker node ls")
        return [host for host in hosts if fits(host, spec.constraints)] or hosts  # if none matches, Swarm reports why

    def answers(self, task: ApiObject) -> bool:
        """Whether the host of a task was up when last listed."""
        return answers(self.known.get(task.get("NodeID", ""), {}))

    def lost(self, task: ApiObject) -> bool:
        """Whether Swarm has ended a task, or its host was down when last listed."""
        host = self.known.get(task.get("NodeID", ""))
        down = host is not None and host["Status"]["State"] == "down"
        return down or task["Status"]["State"] in ("shutdown", "remove", "orphaned")

    def host(self, task: ApiObject) -> str:
        """Return the name of a task's host."""
        host = self.known.get(task.get("NodeID", ""))
        return str(host["Description"]["Hostname"]) if host else "no host"

    def tasks(self, job_id: str) -> list[ApiObject]:
        """Return the tasks of a job, newest last, each with the `Name` of its node."""
        with self.daemon.translating_errors("could not list its tasks"):
            tasks: list[ApiObject] = self.api.tasks(filters={"label": f"{labels.JOB}={job_id}"})  # type: ignore[no-untyped-call]
        found = [{**task, "Name": name} for task in tasks if (name := labels.task_node(task))]
        return sorted(found, key=lambda task: str(task["CreatedAt"]))

    def jobs(self) -> list[JobState]:
        """List the jobs that have services here."""
        with self.daemon.translating_errors("could not list its services"):
            services = self.services()
            tasks: list[ApiObject] = self.api.tasks()  # type: ignore[no-untyped-call]
        return labels.service_jobs(services, tasks)

    def objects(self, job_id: str) -> list[tuple[str, str, Callable[[], Any]]]:
        """Return all objects of a job: kind, name, and a function that removes the object."""
        label = {"label": f"{labels.JOB}={job_id}"}
        with self.daemon.translating_errors("could not list the objects of a job"):
            services = [
                ("service", str(found.name), found.remove)
                for found in self.client.services.list(filters=label)
                if labels.service_job(found.attrs)
            ]
            secrets = [("secret", str(found.name), found.remove) for found in self.client.secrets.list(filters=label)]
            networks = [
                ("network", str(found.name), found.remove) for found in self.client.networks.list(filters=label)
            ]
        relays = [
            ("container", name_of(found), found.remove)
            for found in self.daemon.containers(f"{labels.RELAY}={job_id}")
            if labels.helps(found, labels.RELAY, job_id)
        ]
        return [*services, *relays, *secrets, *networks]

    def remove(self, job_id: str, grace: float) -> None:
        """Remove everything with the job's label, and wait until Swarm has released it; raises EngineError."""
        deadline = self.clock.monotonic() + grace + NETWORK_RELEASE_TIMEOUT
        stuck = ""
        while True:
            objects, tasks, _ = self.objects(job_id), self.tasks(job_id), self.hosts()
            waiting = [task for task in tasks if self.answers(task)]
            if not objects and not waiting:
                break
            if self.clock.monotonic() > deadline:
                left = [name for _, name, _ in objects] + [f"{task['Name']} on {self.host(task)}" for task in waiting]
                stuck = stuck or f"could not remove {', '.join(left)}"
                raise EngineError(stuck, f"python -m orchestrate stop {job_id}")
            stuck = ""
            for kind, name, remove in objects:
                try:
                    with self.daemon.translating_errors(f"could not remove the {kind} {name}"):
                        remove()
                except EngineLost:
                    raise
                except EngineError as error:  # for example because another container uses it
                    stuck = str(error)
            self.clock.sleep(0.1)
        if away := [self.host(task) for task in tasks if task["Status"]["State"] == "running"]:
            hosts = ", ".join(sorted(set(away)))
            raise EngineError(f"could not remove {pluralize(len(away), 'node')} on hosts that are down: {hosts}")

    def services(self, job_id: str = "") -> list[ApiObject]:
        """Return the services of a job, or of all jobs."""
        label = f"{labels.JOB}={job_id}" if job_id else labels.JOB
        found: list[ApiObject] = self.api.services(filters={"label": label})  # type: ignore[no-untyped-call]
        return found


def answers(host: ApiObject) -> bool:
    """Whether Swarm reports a host as up."""
    return bool(host) and bool(host["Status"]["State"] == "ready")


def ready(host: ApiObject) -> bool:
    """Whether a host accepts nodes."""
    return answers(host) and bool(host["Spec"]["Availability"] == "active")


def fits(host: ApiObject, constraints: Iterable[str]) -> bool:
    """Whether a host satisfies constraints such as `node.labels.gpu == a100`; a missing label is empty, as in Swarm."""
    spec, about, platform = host["Spec"], host["Description"], host["Description"].get("Platform", {})
    facts = {"node.id": host["ID"], "node.hostname": about["Hostname"], "node.role": spec.get("Role", "")}
    facts |= {"node.platform.os": platform.get("OS", ""), "node.platform.arch": platform.get("Architecture", "")}
    facts |= {f"node.labels.{key}": value for key, value in (spec.get("Labels") or {}).items()}
    facts |= {f"engine.labels.{key}": value for key, value in (about.get("Engine", {}).get("Labels") or {}).items()}
    for constraint in constraints:
        key, operator, value = re.split(r" ?([!=]=) ?", constraint, maxsplit=1)
        if (facts.get(key, "").lower() == value.lower()) != (operator == "=="):
            return False
    return True


def is_healthy(task: ApiObject) -> bool:
    """Whether a task is running and not being stopped."""
    return bool(task["Status"]["State"] == "running" and task["DesiredState"] == "running")


def is_starting(task: ApiObject) -> bool:
    """Whether a task is being started."""
    return task["Status"]["State"] in COMING and task["DesiredState"] in ("ready", "running")


def ended(task: ApiObject) -> bool:
    """Whether a task has ended."""
    return task["Status"]["State"] in ENDED


def failed(task: ApiObject) -> bool:
    """Whether the container of a task has ended by itself, or did not start."""
    return task["Status"]["State"] in ("complete", "failed")


def gpus(host: ApiObject) -> int:
    """Return the number of GPUs that a host offers."""
    count = 0
    for resource in host["Description"]["Resources"].get("GenericResources") or []:
        named, discrete = resource.get("NamedResourceSpec") or {}, resource.get("DiscreteResourceSpec") or {}
        count += named.get("Kind") == service_spec.GPU
        count += discrete.get("Value", 0) * (discrete.get("Kind") == service_spec.GPU)
    return count


def total_gpus(offered: list[int], nodes: int, spares: int) -> int:
    """Return the total number of GPUs for `nodes` nodes with the same number each, each node on one host."""
    each = max(offered, default=0)
    while each > 1 and sum(count // each for count in offered) < nodes + spares:
        each -= 1
    return min(each * nodes, sum(offered))
