"""Nodes as containers: Compose brings them up, the Docker SDK finds them by label and runs the job in them."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import selectors
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from docker.models.containers import Container

from orchestrate.engines import sockets
from orchestrate.engines.base import JobState, never
from orchestrate.engines.connection import DYING, Link, Linked
from orchestrate.engines.docker import labels, mounts, toolkit
from orchestrate.engines.docker.client import Daemon, Events, begin, name_of
from orchestrate.engines.docker.guard import Guard, wanted
from orchestrate.engines.docker.image import inventory
from orchestrate.engines.docker.volumes import WIPED, volumes
from orchestrate.engines.ports import free_port
from orchestrate.errors import EngineError, EngineLost
from orchestrate.files.paths import PROJECT, JobPaths
from orchestrate.job.outcomes import LOST, WorkerExit
from orchestrate.job.plan import Inventory, Plan, WorkerPlan
from orchestrate.job.spec import JobSpec

RECONCILE = 5.0  # seconds between two lists of containers, in case the event stream has lost something
LAG = 0.1  # seconds by which the engine's list of containers lags behind its events
SHUTDOWN = 3.0  # seconds within which a daemon that ends all containers has exited
SIGNS = 0.2  # seconds in which events explain the loss of a node
HOST_NETWORK = Path(__file__).with_name("host-network.yml")
UP = ("running", "paused")  # the states of a container that still has its processes
PIPE = ["-I", "-S", "/opt/orchestrate/node/pipe.py"]
SOCKETS = "/run/orchestrate"  # where nodes on this kernel listen
LISTENS = 60.0  # seconds from a container's start until its node listens; 5 for the lowest `cpus`, if idle


class DockerEngine(Linked):
    """Nodes on the Docker Engine that the user's `docker` command uses."""

    name = "docker"

    def __init__(self) -> None:
        """Connect; raises EngineError if no engine answers."""
        super().__init__()
        self.daemon = Daemon()
        self.client, self.info = self.daemon.client, self.daemon.info
        self.home, self.network = "", ""  # the job, or the cluster that the nodes belong to
        self.sockets = Path()  # the folder of the nodes' sockets on this machine
        self.stays = False  # whether the nodes outlive the job
        self.env: dict[str, str] = {}
        self.mounts: Callable[[], list[dict[str, Any]]] = list  # finds those that the Compose file does not have
        self.devices: dict[str, Any] = {}  # of each node, in a Compose file
        self.nodes: dict[str, Container] = {}
        self.events: Events | None = None
        self.told: dict[str, set[str]] = {}  # container id: the actions in its events
        self.dying: set[str] = set()  # ids of containers that were asked to end, but are still listed as running
        self.trouble: dict[str, str] = {}  # node: paused or partition
        self.looked = 0.0
        self.guard: Guard | None = None
        self.folders: dict[str, int] = {}  # the inodes of mounted folders, by their paths in nodes

    def inventory(self, spec: JobSpec, run: Path, prepare: bool) -> Inventory:
        """Check the image, list the GPUs; raises ResourceError for what is missing."""
        return inventory(self.daemon, spec, run, prepare)

    def port(self, spec: JobSpec, generation: int) -> int:
        """A free port: in a job's own network, only its last generation could still hold one."""
        return free_port() if spec.network == "host" else 29500 + generation % 1000  # torch's default first

    # --- the job

    def up(self, spec: JobSpec, plan: Plan, run: Path, stopped: Callable[[], bool] = never) -> None:
        """Bring up the nodes that are missing or not healthy."""
        self._settle(spec, plan, run)
        self._bring_up(plan, stopped)
        if self.guard and self.stays:  # so that the next job need not wait for the filter
            self.guard.finish(self._well_ones)

    def _bring_up(self, plan: Plan, stopped: Callable[[], bool]) -> None:
        if len(self._well_nodes()) >= len(plan.nodes):
            return
        self._mend()
        if len(self._well_nodes()) >= len(plan.nodes):
            return
        scale = f"trainer={len(plan.nodes) - 1}"
        arguments = ("--detach", "--no-build", "--no-recreate", "--pull", "never", "--scale", scale)
        self._project(stopped, "up", *arguments, "master", "trainer")
        missing = len(plan.nodes) - len(self._well_nodes())
        if missing > 0:
            raise EngineError(f"Compose did not bring up {missing} of {len(plan.nodes)} nodes", "see docker compose ls")

    def _mend(self) -> None:
        """Repair existing containers, faster than Compose, which then adds the missing ones."""
        found = self._look().values()
        self.daemon.each((node for node in found if node.status != "exited" and not self._well(node)), Container.kill)
        with self.daemon.asking("could not connect a node to its network"):
            for network in self.daemon.networks(self.network):
                for node in found:
                    if self.network not in node.attrs["NetworkSettings"]["Networks"]:
                        network.connect(node, aliases=[node.attrs["Labels"]["com.docker.compose.service"]])
        self.daemon.each((node for node in found if not self._well(node)), begin)

    def _well_nodes(self) -> dict[str, Container]:
        self.nodes = self._well_ones()
        return self.nodes

    def _well_ones(self) -> dict[str, Container]:
        """The healthy nodes; starts the helper of those that have just started."""
        found = {name: node for name, node in self._look().items() if self._well(node)}
        if self.guard:
            self.guard.begin(found.values())
        return found

    def alive(self) -> set[str]:
        """The nodes that run, and are neither paused nor cut off."""
        return set(self._well_ones())

    def adopt(self, spec: JobSpec, plan: Plan, run: Path) -> set[int]:
        """Find the nodes by their label, and ask them for their workers."""
        self._settle(spec, plan, run)
        self.nodes = self._look()
        return self.adopt_workers(plan)

    def start(self, workers: tuple[WorkerPlan, ...], command: tuple[str, ...]) -> None:
        """Start the workers on their nodes."""
        if self.guard:
            self.guard.finish(self._well_ones)
        self._listen(0)  # earlier events are about earlier generations
        self.told = {}
        super().start(workers, command)

    def wait(self, timeout: float) -> list[WorkerExit]:
        """The workers that have ended, as their nodes report; also checks the containers every few seconds."""
        exits = super().wait(timeout)
        if self.running and time.monotonic() - self.looked > RECONCILE:
            self._reconcile()
            self.looked = time.monotonic()
        return exits

    def explain(self, end: WorkerExit, node: str) -> str:
        """The cause, from what its node has reported, events, and the state of the container."""
        sign = self.signs.get(end.rank)
        if sign == "oom":
            return "out of memory" if end.code == LOST else "out of memory in a child"
        until = time.monotonic() + SIGNS
        while sign is None and time.monotonic() < until:
            self._listen(until - time.monotonic())
        container = self.nodes.get(node)
        told = self.told.get(str(container.id), set()) if container else set()
        try:
            found = self._look()
        except EngineLost:
            if sign == "":  # its node runs, and is reached without the engine
                return ""
            raise
        if not any(container.status == "running" for container in found.values()):
            self._expect_shutdown()
        runs = node in found and found[node].status == "running"
        if "oom" in told and not runs:
            return "out of memory"
        if sign == "ending" or "kill" in told or "destroy" in told:
            if runs and "die" not in told:  # the engine may report it later than the node
                self.dying.add(str(found[node].id))
            return "node stopped"
        if not runs:
            return "node lost"
        return "" if self._well(found[node]) else "partition"

    def troubles(self) -> dict[str, str]:
        """Nodes that are paused or cut off, when the containers were last listed."""
        return dict(self.trouble)

    def stop(self, kill: bool) -> None:
        """Stop or kill all workers; unpause nodes first, whose workers could not react."""
        paused = [self.nodes[name] for name, what in self.trouble.items() if what == "paused" and name in self.nodes]
        self.daemon.each(paused, Container.unpause)
        super().stop(kill)

    def warnings(self) -> list[str]:
        """Requests that nodes have refused, and why nodes are not protected."""
        return super().warnings() + (self.guard.warnings() if self.guard else [])

    def discard(self, nodes: Iterable[str]) -> None:
        """Remove containers by force."""
        found = [self.nodes[name] for name in nodes if name in self.nodes]
        self.daemon.each(found, lambda node: node.remove(force=True, v=True))

    def down(self, grace: float, stopped: Callable[[], bool] = never) -> None:
        """Remove nodes and network; clean up the nodes of a cluster for another job."""
        if self.events is not None:
            self.events.close()
        if self.guard:
            self.guard.close()
        if self.stays:
            self.nodes = {name: node for name, node in self._look().items() if self._well(node)}
            self._clean(self.nodes)
            sockets.tidy(self.sockets, {str(node.short_id) for node in self.nodes.values()})
        elif self.home:
            self.remove(self.home, grace if self.running else 0)  # an idle node has no workers to stop

    # --- from another shell

    def jobs(self) -> list[JobState]:
        """The jobs that have nodes, by their labels."""
        nodes = [job for container in self.daemon.containers(labels.JOB) if (job := labels.node_job(container))]
        count, jobs = Counter(job.job_id for job in nodes), {job.job_id: job for job in reversed(nodes)}
        return [dataclasses.replace(jobs[name], nodes=count[name]) for name in sorted(jobs)]

    def holds(self, job_id: str) -> list[str]:
        """Containers and networks that carry the job's label."""
        label = f"{labels.JOB}={job_id}"
        with self.daemon.asking("could not list its networks"):
            networks = [
                f"network {network.name}"
                for network in self.client.networks.list(filters={"label": label, "driver": "bridge"})
            ]
        containers = self._nodes_of(job_id) + self._helpers_of(job_id)
        return sorted(f"container {name_of(container)}" for container in containers) + networks

    def remove(self, job_id: str, grace: float) -> None:
        """Stop and remove the containers and networks with the job's label, and nothing else."""
        if self.guard:
            self.guard.close()
        nodes = self._nodes_of(job_id)
        if grace:
            self.daemon.each(nodes, lambda node: node.stop(timeout=int(grace)))
        nodes += self._helpers_of(job_id)  # of an orchestrator that was killed
        self.daemon.each(nodes, lambda node: node.remove(force=True, v=True))
        with self.daemon.asking(f"could not remove a network of {job_id}"):
            networks = self.client.networks.list(filters={"label": f"{labels.JOB}={job_id}", "driver": "bridge"})
            for network in networks:
                network.remove()
        for folder in self._sockets_of(job_id, [thing.attrs["Labels"] for thing in (*nodes, *networks)]):
            sockets.unshare(folder)

    def _sockets_of(self, job_id: str, found: list[dict[str, str]]) -> set[Path]:
        """The folders of a job's sockets that are known from labels or `_settle`."""
        states = [job for each in found if (job := labels.job(each, self.name)) and job.named and job.job_id == job_id]
        return {job.paths.sockets for job in states} | ({self.sockets} if self.home == job_id else set())

    # --- details

    def _settle(self, spec: JobSpec, plan: Plan, run: Path) -> None:
        """Set the job whose nodes this is about, and listen to its events."""
        code = plan.inventory.code
        command = () if plan.job_id == plan.inventory.cluster else spec.command  # a cluster runs none
        self.mounts = partial(mounts.of_nodes, run, Path(code), command)
        self._take_key(run)
        self.home, self.stays, self.sockets = plan.home, bool(plan.inventory.cluster), JobPaths(run.parent).sockets
        self.network = "host" if spec.network == "host" else f"{plan.home}_job"
        filtered, way = wanted(spec), toolkit.way(self.info)
        self.devices = toolkit.service(way, plan.gpus)
        self.env = {
            "JOB_ID": self.home,
            "JOB_OWNER": str(os.getuid()),
            "NODE_MODE": "wait",
            "NODE_KEY": self.key.hex(),
            "NODE_IMAGE": spec.image,
            "NODE_PYTHON": plan.inventory.python,
            "NODE_CODE": code,
            "NODE_JOB_DIR": str(run),
            "NODE_USER": self.daemon.user(run, spec),
            "NODE_RUNTIME": "nvidia" if plan.gpus and way != "cdi" else self.info["DefaultRuntime"],
            "NODE_GPUS": (",".join(plan.gpus) if way != "cdi" else "") or "void",
            "NODE_SHM": spec.shm_size,
            "NODE_MEMORY": str(plan.limits.memory),
            "NODE_TMP": str(plan.limits.tmp),
            "NODE_PIDS": str(plan.limits.processes),
            "NODE_CPUS": str(spec.cpus or 0),
            "NODE_GRACE": str(spec.grace),
            "NODE_PRELOAD": " ".join(plan.inventory.preload),
            "NODE_FILTERED": "1" if filtered else "",
            "NODE_SOCKETS": SOCKETS if self._same_kernel() and sockets.possible(run.parent) else "",
        }
        if self.env["NODE_SOCKETS"] and not self.folders:
            self.folders = mounts.inodes(run, Path(code))
        if self.guard is None and filtered:
            self.guard = Guard(self.daemon, self.home, run)
        if self.events is None:
            self.events = Events(self.daemon, self._ours)
            self.selector.register(self.events.bell, selectors.EVENT_READ, "")

    def _nodes_of(self, job_id: str) -> list[Container]:
        return [found for found in self.daemon.containers(f"{labels.JOB}={job_id}") if labels.node(found)]

    def _helpers_of(self, job_id: str) -> list[Container]:
        found = self.daemon.containers(f"{labels.GUARD}={job_id}")
        return [one for one in found if labels.helps(one, labels.GUARD, job_id)]

    def _look(self) -> dict[str, Container]:
        """The job's containers by the names of their nodes; waits for those that are being killed."""
        deadline = time.monotonic() + DYING
        while True:
            self._hear()
            found = {labels.node(node): node for node in self._nodes_of(self.home)}
            if time.monotonic() > deadline or not any(
                node.id in self.dying and node.status == "running" for node in found.values()
            ):
                self.dying = set()
                return found
            time.sleep(0.02)

    def _well(self, container: Container) -> bool:
        """Whether it is running, not paused, and on the job's network."""
        networks = container.attrs["NetworkSettings"]["Networks"]
        return container.status == "running" and self.network in networks

    def _exists(self, node: str) -> bool:
        return node in self.nodes and self.nodes[node].status in UP

    def _connect(self, node: str) -> Link | None:
        if node not in self.nodes:
            return None
        container = self.nodes[node]
        if container.status == "running" and self.env["NODE_SOCKETS"]:
            with contextlib.suppress(OSError, EngineError):
                path = self.sockets / str(container.short_id)
                return sockets.connect(path, self.key, lambda: self.daemon.young(container, LISTENS))
        return self.daemon.talk(str(container.id), [self.env["NODE_PYTHON"], *PIPE], self.key)

    def _request(self, worker: WorkerPlan) -> dict[str, Any]:
        filtered = self.guard is not None and self.guard.expects(self.nodes[worker.node])
        return {**super()._request(worker), "filtered": filtered, "folders": self.folders}

    def _same_kernel(self) -> bool:
        """Whether we can connect to a node's socket in the run directory, which is named after its host name."""
        desktop = "Docker Desktop" in self.info["OperatingSystem"]  # a virtual machine
        return sys.platform == "linux" and not desktop and self.network != "host"

    def _runs(self, node: str) -> bool:
        """Whether its container is up: the connection may have ended alone."""
        found = self._look().get(node)
        if found is None or found.status not in UP:
            return False
        if found.status == "paused":
            raise EngineLost(f"{node} is paused")
        self.nodes[node] = found
        return True

    def _listen(self, timeout: float) -> None:
        super()._listen(timeout)
        self._hear()

    def _hear(self) -> None:
        for event in self.events.taken() if self.events else ():
            self._read(event)

    def _ours(self, event: dict[str, Any]) -> bool:
        attributes = event["Actor"]["Attributes"]
        return self.home in (attributes.get(labels.JOB), attributes.get("name", "").removesuffix("_job"))

    def _read(self, event: dict[str, Any]) -> None:
        """Record an event of a container, or that the containers must be listed."""
        action, actor, attributes = event["Action"], event["Actor"]["ID"], event["Actor"]["Attributes"]
        if action == "kill" and attributes.get("signal") in ("9", "15"):
            self.told.setdefault(actor, set()).add(action)
            self.dying.add(actor)
        elif action in ("oom", "destroy", "die"):
            self.told.setdefault(actor, set()).add(action)
            self.dying.discard(actor)
        if event["Type"] == "network" or action in ("pause", "unpause", "die"):
            self.looked = time.monotonic() - RECONCILE + LAG

    def _reconcile(self) -> None:
        """List the containers: which nodes have ended, and which are paused or cut off."""
        found = self._look()
        self.trouble = {name: "paused" for name, node in found.items() if node.status == "paused"}
        cut_off = [name for name, node in found.items() if node.status == "running" and not self._well(node)]
        self.trouble |= dict.fromkeys(cut_off, "partition")
        self.broken |= {node for node in self.running.values() if node not in found or node not in self.links}

    def _expect_shutdown(self) -> None:
        """Raise EngineLost if no node is left because the daemon is being stopped or was restarted."""
        deadline = time.monotonic() + SHUTDOWN
        while time.monotonic() < deadline:
            if self.events and self.events.broken > time.monotonic() - 2 * SHUTDOWN:
                raise EngineLost("the engine was restarted")
            with self.daemon.asking("does not answer"):
                self.client.ping()
            time.sleep(0.2)

    def _project(self, stopped: Callable[[], bool], *arguments: str) -> None:
        sockets.share(self.sockets, self.env["NODE_USER"])
        files = [PROJECT / "docker-compose.yml", *([HOST_NETWORK] if self.network == "host" else []), "-"]
        options = [word for file in files for word in ("--file", str(file))]
        words = ["--project-name", self.home, "--profile", "gpu", *options, *arguments]
        wiped = [*WIPED, *volumes(self.daemon, self.env["NODE_IMAGE"])]
        env = {**self.env, "NODE_WIPE": " ".join(wiped)}
        more = [mounts.bind(self.sockets, SOCKETS)] if env["NODE_SOCKETS"] else []
        given = mounts.document([*self.mounts(), *more], self.devices)
        self.daemon.compose(*words, env=env, given=given, capture=True, stopped=stopped)
