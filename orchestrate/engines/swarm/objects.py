"""Objects of one job in a Swarm: services, tasks, network, secret and relay."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrate.clock import wait_until
from orchestrate.engines.docker import helper_containers, labels, program
from orchestrate.engines.swarm import service_spec
from orchestrate.engines.swarm.manager import ApiObject, Manager, ended, failed
from orchestrate.errors import EngineError
from orchestrate.plan import container
from orchestrate.plan.plan import Plan
from orchestrate.spec.spec import JobSpec

if TYPE_CHECKING:
    from docker.models.containers import Container

PLACEMENT_TIMEOUT = 1.0  # seconds to wait until a task is assigned to a host
LAST_LINES = "2000"  # log lines to fetch from a lost task
# Bytes of memory of a relay, and of its connections to a node: some 4 MB each.
RELAY_MEMORY, CONNECTION_MEMORY = 128 << 20, 32 << 20
RELAY_PROCESSES = 4096  # limit of a relay; each connection is a process


class SwarmJob:
    """The objects of one job."""

    def __init__(self, manager: Manager, spec: JobSpec, plan: Plan, run: Path, key: bytes) -> None:
        """`run` contains the job's files; `key` is the key of the nodes and their relay."""
        self.manager, self.spec, self.plan, self.run, self.key = manager, spec, plan, run, key
        self.daemon, self.client, self.api = manager.daemon, manager.client, manager.api
        self.project = plan.project  # the job, or the cluster that owns the nodes
        self.network = "host" if spec.network == "host" else f"{plan.project}_job"
        self.port = service_spec.port(spec, plan.project)  # port of the relay
        self.labels = {labels.JOB: plan.project, labels.RUN: str(run), labels.OWNER: str(os.getuid())}
        self.relay: Container | None = None

    def tasks(self) -> list[ApiObject]:
        """Return the tasks of the job, newest last, each with the `Name` of its node."""
        return self.manager.tasks(self.project)

    def look(self) -> dict[str, ApiObject]:
        """List hosts and tasks again; return the newest task of each node by name, ended or not."""
        self.manager.hosts()
        return {task["Name"]: task for task in self.tasks()}

    def dead(self) -> set[str]:
        """Return the ids of ended tasks, as reported by hosts that are up."""
        self.manager.hosts()
        return {task["ID"] for task in self.tasks() if self.manager.answers(task) and ended(task)}

    def refusal(self, old: set[str], impatient: bool) -> tuple[str, str] | None:
        """Return why a task not in `old` cannot start, and a hint; `impatient` includes tasks that no host accepts."""
        for task in self.tasks():
            state, error = task["Status"]["State"], task["Status"].get("Err", "")
            waits = state == "pending" and "no suitable node" in error
            if task["ID"] not in old and (state == "rejected" or failed(task) or (waits and impatient)):
                return service_spec.explain_error(error or state, self.manager.host(task), self.spec.image)
        return None

    def replace(self, old: set[str], gone: Callable[[ApiObject], bool]) -> bool:
        """Replace tasks not in `old` that are `gone`, and add them to it; False if there are none."""
        found = [task for task in self.tasks() if task["ID"] not in old and gone(task)]
        old |= {task["ID"] for task in found}
        for task in found:
            self.scale(task["Name"].partition("-")[0], 1)
        return bool(found)

    def output(self, task: ApiObject) -> bytes:
        """Return the last lines of a task's stdout from Swarm's log; empty if they cannot be read."""
        with contextlib.suppress(Exception):  # any error of the SDK only leaves the log shorter
            found = self.api.service_logs(task["ServiceID"], details=True, stdout=True, is_tty=False, tail=LAST_LINES)
            lines = (line.partition(b" ") for line in b"".join(found).split(b"\n"))
            return b"\n".join(text for details, _, text in lines if f"task.id={task['ID']}".encode() in details)
        return b""

    def prepare(self) -> None:
        """Create the job's network."""
        with self.daemon.translating_errors("could not create the job's network"):
            if self.network != "host" and not self.daemon.network(self.network):
                options = {"encrypted": ""} if self.spec.encrypt else {}
                self.client.networks.create(
                    self.network,
                    "overlay",
                    options=options,
                    labels=self.labels,
                    attachable=True,
                    internal=self.spec.isolated,
                )

    def connect(self) -> None:
        """Start the relay, as a container: Swarm would count a task as a node when it spreads nodes over hosts."""
        with self.daemon.translating_errors("could not start the relay"):
            name = labels.helper_name(labels.RELAY, self.project)
            found = self.client.containers.list(all=True, filters={"name": f"^/{name}$"})
            if found and found[0].status != "running":
                found.pop().remove(force=True, v=True)
            self.relay = found[0] if found else self._start_relay(name)
            self.relay.reload()

    def _start_relay(self, name: str) -> Container:
        nodes = self.spec.trainers + 1 + self.spec.spares
        relay = helper_containers.create(
            self.daemon,
            name,
            RELAY_MEMORY + nodes * CONNECTION_MEMORY,
            RELAY_PROCESSES,
            {"NetworkMode": self.network, "Binds": [f"{program.folder(self.spec)}:{program.TARGET}:ro"], "Init": True},
            {
                "Entrypoint": ["python", container.PROGRAM],
                "Env": ["NODE_MODE=relay", f"NODE_PORT={self.port}", f"NODE_KEY={self.key.hex()}"],
                "Labels": labels.only({labels.RELAY: self.project}),
                "User": self.daemon.user(self.run, self.spec),
                "Healthcheck": {"Test": ["NONE"]},
            },
        )
        self.api.start(relay)
        return self.client.containers.get(relay)

    def relay_address(self) -> tuple[str, int]:
        """Return the relay's address and port for nodes."""
        assert self.relay
        if self.network == "host":
            return self.manager.address, self.port
        return str(self.relay.attrs["NetworkSettings"]["Networks"][self.network]["IPAddress"]), self.port

    def node_address(self, task: ApiObject) -> tuple[str, int]:
        """Return a node's address and port."""
        if self.network == "host":
            number = int(task["Name"].partition("-")[2] or 0)
            return str(self.manager.known[task["NodeID"]]["Status"]["Addr"]), self.port + 1 + number
        for attached in task.get("NetworksAttachments") or []:
            if attached["Network"]["Spec"]["Name"] == self.network:
                return str(attached["Addresses"][0].partition("/")[0]), self.port + 1
        raise EngineError(f"{task['Name']} has no address on the job's network")

    def scale(self, role: str, more: int) -> None:
        """Add tasks to a service, which is created if it does not exist, and wait until they have hosts.

        With its restart policy, Swarm does not replace ended tasks; a new task gets the next slot.
        """
        if more <= 0:
            return
        count = len(self.tasks()) + more
        self._scale(role, more)
        # Two services that are placed at the same time may share a host.
        wait_until(
            lambda: sum("NodeID" in task for task in self.tasks()) >= count, PLACEMENT_TIMEOUT, self.manager.clock
        )

    def _scale(self, role: str, more: int) -> None:
        name = f"{self.project}-{role}"
        with self.daemon.translating_errors(f"could not start the service {name}"):
            for service in self.manager.services(self.project):
                there = service["Spec"]
                if there["Name"] == name:  # changing more than the number would recreate all tasks
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
            image = self.client.images.get(self.spec.image).attrs
            template = service_spec.task(
                self.spec,
                self.plan,
                role,
                image=(image["RepoDigests"] or [image["Id"]])[0],
                user=self.daemon.user(self.run, self.spec),
                network=str(self.daemon.network(self.network)["Id"]),
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

    def _secret(self) -> tuple[str, str]:
        """Return the id and name of the job's secret, which is created if it does not exist."""
        name = f"{self.project}-node"
        listed = self.client.secrets.list(filters={"name": name})  # all names that begin with it
        found = [one for one in listed if one.name == name]
        made = found[0].attrs if found else self.api.create_secret(name, service_spec.program(), self.labels)
        return str(made["ID"]), name
