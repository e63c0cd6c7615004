"""Access to Docker Swarm: its hosts, and a job's services, tasks, network, secret and relay."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from docker.models.containers import Container

from orchestrate.engines.base import JobState
from orchestrate.engines.docker import helpers, labels
from orchestrate.engines.docker.client import Daemon, name_of
from orchestrate.engines.swarm import service_spec as parts
from orchestrate.errors import EngineError, EngineLost, ResourceError
from orchestrate.files.paths import PACKAGE
from orchestrate.job.plan import Plan, counted
from orchestrate.job.spec import JobSpec

PLACED = 1.0  # seconds within which a task is assigned to a host
LAST = "2000"  # log lines to fetch of a lost task
RELAYS, RELAYED = 128 << 20, 32 << 20  # bytes of memory of a relay, and of its connections to a node: some 4 MB each
PROCESSES = 4096  # of a relay, one for each connection
VANISHES = 20.0  # seconds that Swarm takes to release a network whose tasks have ended
NO_MANAGER = "run orchestrate on a manager (docker node ls there), or make this host one: docker swarm init"
COMING = ("new", "pending", "assigned", "accepted", "preparing", "ready", "starting")  # states of a task
ENDED = ("complete", "shutdown", "failed", "rejected", "remove", "orphaned")
Thing = dict[str, Any]  # a host or a task, as in the Engine's API


class Manager:
    """The Swarm manager that the user's `docker` command uses, and what one job has in the Swarm."""

    def __init__(self) -> None:
        """Connect; raises EngineError if no manager answers."""
        self.daemon = Daemon()
        self.client, self.api = self.daemon.client, self.daemon.client.api
        self.info: Thing = self.daemon.info
        swarm = self.info.get("Swarm", {})
        if not swarm.get("ControlAvailable"):
            state = "not a manager" if swarm.get("LocalNodeState") == "active" else "in no Swarm"
            raise EngineError(f"the engine at {self.daemon.host} is {state}", NO_MANAGER)
        self.address = str(swarm["NodeAddr"])  # of this host, as other hosts reach it
        self.home, self.network, self.run = "", "", Path()
        self.labels: dict[str, str] = {}
        self.port = 0
        self.key = b""
        self.relay: Container | None = None
        self.known: dict[str, Thing] = {}  # the hosts by id, when last listed

    # --- hosts, tasks and jobs

    def hosts(self) -> dict[str, Thing]:
        """The hosts by id; lists them again."""
        with self.daemon.asking("could not list its hosts"):
            self.known = {host["ID"]: host for host in self.api.nodes()}
        return self.known

    def takers(self, spec: JobSpec) -> list[Thing]:
        """The hosts that take a job's nodes; raises ResourceError if none is ready."""
        hosts = [host for host in self.hosts().values() if ready(host)]
        if not hosts:
            raise ResourceError("no host of the Swarm is ready", "see docker node ls")
        return [host for host in hosts if fits(host, spec.constraints)] or hosts  # if none matches, Swarm reports why

    def answers(self, task: Thing) -> bool:
        """Whether the host of a task was up when last listed."""
        return answers(self.known.get(task.get("NodeID", ""), {}))

    def host(self, task: Thing) -> str:
        """The name of a task's host."""
        host = self.known.get(task.get("NodeID", ""))
        return str(host["Description"]["Hostname"]) if host else "no host"

    def tasks(self) -> list[Thing]:
        """The tasks of the job, the newest last, each with the `Name` of its node."""
        with self.daemon.asking("could not list its tasks"):
            tasks: list[Thing] = self.api.tasks(filters={"label": f"{labels.JOB}={self.home}"})  # type: ignore[no-untyped-call]
        found = [{**task, "Name": name} for task in tasks if (name := labels.task_node(task))]
        return sorted(found, key=lambda task: str(task["CreatedAt"]))

    def look(self) -> dict[str, Thing]:
        """The newest task of each node, ended or not, by the node's name; also lists the hosts again."""
        self.hosts()
        return {task["Name"]: task for task in self.tasks()}

    def dead(self) -> set[str]:
        """The ids of the tasks that have ended, as reported by hosts that are up."""
        self.hosts()
        return {task["ID"] for task in self.tasks() if self.answers(task) and ended(task)}

    def refusal(self, image: str, old: set[str], impatient: bool) -> tuple[str, str] | None:
        """Why a task not in `old` cannot start, and a hint; `impatient`: also for a task that no host takes."""
        for task in self.tasks():
            state, error = task["Status"]["State"], task["Status"].get("Err", "")
            waits = state == "pending" and "no suitable node" in error
            if task["ID"] not in old and (state == "rejected" or unstarted(task) or (waits and impatient)):
                return parts.in_words(error, self.host(task), image)
        return None

    def replace(self, spec: JobSpec, plan: Plan, old: set[str]) -> bool:
        """Replace tasks not in `old` whose containers failed to start, and add them to it; False if there are none."""
        failed = [task for task in self.tasks() if task["ID"] not in old and unstarted(task)]
        old |= {task["ID"] for task in failed}
        for task in failed:
            self.scale(spec, plan, task["Name"].partition("-")[0], 1)
        return bool(failed)

    def output(self, task: Thing) -> bytes:
        """The last lines of a task's stdout, from Swarm's log; empty if they cannot be read."""
        with contextlib.suppress(Exception):  # after any error of the SDK, the log only stays shorter
            found = self.api.service_logs(task["ServiceID"], details=True, stdout=True, is_tty=False, tail=LAST)
            lines = (line.partition(b" ") for line in b"".join(found).split(b"\n"))
            return b"\n".join(text for details, _, text in lines if f"task.id={task['ID']}".encode() in details)
        return b""

    def jobs(self) -> list[JobState]:
        """The jobs that have services here."""
        with self.daemon.asking("could not list its services"):
            services = self._services()
            tasks: list[Thing] = self.api.tasks()  # type: ignore[no-untyped-call]
        nodes = Counter(task["ServiceID"] for task in tasks if task["DesiredState"] == "running")
        jobs: dict[str, JobState] = {}
        for service in services:
            if job := labels.service_job(service):
                count = nodes[service["ID"]] + (jobs[job.job_id].nodes if job.job_id in jobs else 0)
                jobs[job.job_id] = dataclasses.replace(job, nodes=count)
        return [jobs[name] for name in sorted(jobs)]

    def things(self, job_id: str) -> list[tuple[str, str, Callable[[], Any]]]:
        """Everything that a job has: the kind, the name, and a function that removes it."""
        label = {"label": f"{labels.JOB}={job_id}"}
        with self.daemon.asking("could not list the objects of a job"):
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
            ("container", name_of(found), partial(found.remove, force=True, v=True))
            for found in self.daemon.containers(f"{labels.RELAY}={job_id}")
            if labels.helps(found, labels.RELAY, job_id)
        ]
        return [*services, *relays, *secrets, *networks]

    # --- create and remove

    def settle(self, plan: Plan, run: Path, spec: JobSpec, key: bytes) -> None:
        """Set the job, and the key of its nodes and their relay."""
        self.home, self.run, self.key = plan.home, run, key
        self.network = "host" if spec.network == "host" else f"{plan.home}_job"
        self.port = parts.port(spec, plan.home)  # where the relay answers
        self.labels = {labels.JOB: plan.home, labels.RUN: str(run), labels.OWNER: str(os.getuid())}

    def prepare(self, spec: JobSpec) -> None:
        """Create the job's network."""
        with self.daemon.asking("could not create the job's network"):
            if self.network != "host" and not self.daemon.networks(self.network):
                options = {"encrypted": ""} if spec.encrypt else {}
                self.client.networks.create(
                    self.network, "overlay", options=options, labels=self.labels, attachable=True
                )

    def connect(self, spec: JobSpec) -> None:
        """Start the relay, as a container: Swarm would count a task as a node, and spread the nodes to other hosts."""
        with self.daemon.asking("could not start the relay"):
            name = labels.helper_name(labels.RELAY, self.home)
            found = self.client.containers.list(all=True, filters={"name": f"^/{name}$"})
            if found and found[0].status != "running":
                found.pop().remove(force=True, v=True)
            self.relay = found[0] if found else self._start_relay(name, spec)
            self.relay.reload()

    def _start_relay(self, name: str, spec: JobSpec) -> Container:
        nodes = spec.trainers + 1 + spec.spares
        relay = helpers.create(
            self.daemon,
            RELAYS + nodes * RELAYED,
            PROCESSES,
            {"network_mode": self.network, "binds": [f"{PACKAGE}:/opt/orchestrate:ro"], "init": True},
            name=name,
            entrypoint=["python", "/opt/orchestrate/node"],
            environment={"NODE_MODE": "relay", "NODE_PORT": str(self.port), "NODE_KEY": self.key.hex()},
            labels=labels.only({labels.RELAY: self.home}),
            user=self.daemon.user(self.run, spec),
            healthcheck={"test": ["NONE"]},
        )
        self.api.start(relay)
        return self.client.containers.get(relay)

    def relay_address(self) -> tuple[str, int]:
        """The relay's address and port, as nodes reach it."""
        assert self.relay
        if self.network == "host":
            return self.address, self.port
        return str(self.relay.attrs["NetworkSettings"]["Networks"][self.network]["IPAddress"]), self.port

    def node_address(self, task: Thing) -> tuple[str, int]:
        """A node's address and port."""
        if self.network == "host":
            number = int(task["Name"].partition("-")[2] or 0)
            return str(self.known[task["NodeID"]]["Status"]["Addr"]), self.port + 1 + number
        for attached in task.get("NetworksAttachments") or []:
            if attached["Network"]["Spec"]["Name"] == self.network:
                return str(attached["Addresses"][0].partition("/")[0]), self.port + 1
        raise EngineError(f"{task['Name']} has no address on the job's network")

    def scale(self, spec: JobSpec, plan: Plan, role: str, more: int) -> None:
        """Add tasks to a service, which is created if it does not exist, and wait until they have their hosts.

        With its restart policy, Swarm does not replace tasks that have ended; a new task gets the next slot.
        """
        if more <= 0:
            return
        count, deadline = len(self.tasks()) + more, time.monotonic() + PLACED
        self._scale(spec, plan, role, more)
        while time.monotonic() < deadline and sum("NodeID" in task for task in self.tasks()) < count:
            time.sleep(0.02)  # tasks of two services that are placed at the same time may share a host

    def _scale(self, spec: JobSpec, plan: Plan, role: str, more: int) -> None:
        name = f"{self.home}-{role}"
        with self.daemon.asking(f"could not start the service {name}"):
            for service in self._services(self.home):
                there = service["Spec"]
                if there["Name"] == name:  # any change other than the number would recreate all tasks
                    self.api.update_service(
                        service["ID"],
                        service["Version"]["Index"],
                        task_template=there["TaskTemplate"],
                        name=name,
                        labels=there["Labels"],
                        mode={"Replicated": {"Replicas": there["Mode"]["Replicated"]["Replicas"] + more}},
                        endpoint_spec={"Mode": "dnsrr"},
                    )
                    return
            image = self.client.images.get(spec.image).attrs
            template = parts.task(
                spec,
                plan,
                role,
                image=(image["RepoDigests"] or [image["Id"]])[0],
                user=self.daemon.user(self.run, spec),
                network=str(self.daemon.networks(self.network)[0].id),
                secret=self._secret(),
                key=self.key,
                volumes=(image.get("Config") or {}).get("Volumes") or (),
            )
            self.api.create_service(  # type: ignore[no-untyped-call]
                template,
                name=name,
                labels=self.labels,
                mode={"Replicated": {"Replicas": more}},
                endpoint_spec={"Mode": "dnsrr"},
            )

    def remove(self, job_id: str, grace: float) -> None:
        """Remove everything with the job's label, and wait until Swarm has released it; raises EngineError."""
        deadline = time.monotonic() + grace + VANISHES
        self.home, stuck = job_id, ""
        while True:
            things, tasks, _ = self.things(job_id), self.tasks(), self.hosts()
            waiting = [task for task in tasks if self.answers(task)]
            if not things and not waiting:
                break
            if time.monotonic() > deadline:
                left = [name for _, name, _ in things] + [f"{task['Name']} on {self.host(task)}" for task in waiting]
                raise EngineError(stuck or f"{', '.join(left)} did not end", f"python -m orchestrate stop {job_id}")
            for kind, name, remove in things:
                try:
                    with self.daemon.asking(f"could not remove the {kind} {name}"):
                        remove()
                except EngineLost:
                    raise
                except EngineError as error:  # for example because another container uses it
                    stuck = str(error)
            time.sleep(0.1)
        if away := [self.host(task) for task in tasks if task["Status"]["State"] == "running"]:
            raise EngineError(f"{counted(len(away), 'node')} on {', '.join(sorted(set(away)))}, which is down")

    def _services(self, job_id: str = "") -> list[Thing]:
        label = f"{labels.JOB}={job_id}" if job_id else labels.JOB
        found: list[Thing] = self.api.services(filters={"label": label})  # type: ignore[no-untyped-call]
        return found

    def _secret(self) -> tuple[str, str]:
        """Id and name of the job's secret."""
        name = f"{self.home}-node"
        found = self.client.secrets.list(filters={"name": name})
        made = found[0].attrs if found else self.api.create_secret(name, parts.program(), self.labels)
        return str(made["ID"]), name


def answers(host: Thing) -> bool:
    """Whether Swarm reports a host as up."""
    return bool(host) and bool(host["Status"]["State"] == "ready")


def ready(host: Thing) -> bool:
    """Whether a host takes nodes."""
    return answers(host) and bool(host["Spec"]["Availability"] == "active")


def fits(host: Thing, constraints: Iterable[str]) -> bool:
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


def well(task: Thing) -> bool:
    """Whether a task runs and is not being stopped."""
    return bool(task["Status"]["State"] == "running" and task["DesiredState"] == "running")


def coming(task: Thing) -> bool:
    """Whether a task is being started."""
    return task["Status"]["State"] in COMING and task["DesiredState"] in ("ready", "running")


def ended(task: Thing) -> bool:
    """Whether a task has ended."""
    return task["Status"]["State"] in ENDED


def unstarted(task: Thing) -> bool:
    """Whether a task has ended because its container failed to start."""
    return task["Status"]["State"] == "failed" and "starting container failed" in task["Status"].get("Err", "")


def gpus(host: Thing) -> int:
    """How many GPUs a host offers."""
    count = 0
    for resource in host["Description"]["Resources"].get("GenericResources") or []:
        named, counted = resource.get("NamedResourceSpec") or {}, resource.get("DiscreteResourceSpec") or {}
        count += (named.get("Kind") == parts.GPU) + counted.get("Value", 0) * (counted.get("Kind") == parts.GPU)
    return count


def shared_out(offered: list[int], nodes: int, spares: int) -> int:
    """How many GPUs `nodes` nodes can have in total, with the same number each, all of it on one host."""
    each = max(offered, default=0)
    while each > 1 and sum(count // each for count in offered) < nodes + spares:
        each -= 1
    return min(each * nodes, sum(offered))
