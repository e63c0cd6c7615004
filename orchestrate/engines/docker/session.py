"""Containers as nodes of a job: Compose starts them, and they are found by label."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from orchestrate.clock import SYSTEM, Clock
from orchestrate.engines import sockets
from orchestrate.engines.base import Observed, Stop, never
from orchestrate.engines.client_session import ClientSession, key_of
from orchestrate.engines.connection import NodeConnection
from orchestrate.engines.docker import compose_override, folders, labels, mounts, objects, program, toolkit
from orchestrate.engines.docker.api import Container
from orchestrate.engines.docker.client import Daemon, Events, begin
from orchestrate.engines.docker.guard import Guard, wanted
from orchestrate.engines.docker.services import Services
from orchestrate.engines.docker.volumes import WIPED, volumes
from orchestrate.engines.node_clients import NODE_EXIT_TIMEOUT, NodeClients
from orchestrate.errors import EngineError, EngineLost
from orchestrate.files.paths import PACKAGE, PROJECT
from orchestrate.node.messages import protocol
from orchestrate.plan.container import PIPE
from orchestrate.plan.plan import Plan, WorkerPlan
from orchestrate.record.outcomes import WorkerExit
from orchestrate.record.paths import JobPaths
from orchestrate.spec.causes import Reason
from orchestrate.spec.spec import JobSpec

RECONCILE_INTERVAL = 5.0  # seconds between two lists of containers, since the event stream may lose events
LIST_LAG = 0.1  # seconds by which the engine's list of containers lags behind its events
SHUTDOWN_TIMEOUT = 3.0  # seconds until a daemon that stops all containers has exited
EVENT_TIMEOUT = 0.2  # seconds to wait for events that explain the loss of a node
HOST_NETWORK = Path(__file__).with_name("host-network.yml")
UP = ("running", "paused")  # states of a container whose processes exist
SOCKETS = "/run/orchestrate"  # folder of node sockets in nodes that share our kernel
LISTEN_TIMEOUT = 60.0  # seconds from a container's start until its node listens; idle, 5 with the lowest `cpus`


class DockerSession(ClientSession):
    """The containers of one job, started by Compose and found by label."""

    secrets = compose_override.SECRETS

    def __init__(self, daemon: Daemon, spec: JobSpec, plan: Plan, run: Path, warn: Callable[[str], None]) -> None:
        """`run` is mounted in nodes; raises EngineError if that is not possible, or the job has no key."""
        self.daemon, self.spec, self.warn, self.key = daemon, spec, warn, key_of(run)
        self.clock: Clock = SYSTEM
        self.project = plan.project  # the job, or the cluster that owns the nodes
        self.persistent = bool(plan.placement.cluster)  # whether the nodes outlive the job
        self.network = "host" if spec.network == "host" else f"{plan.project}_job"
        self.sockets = JobPaths(run.parent).sockets  # the folder of the nodes' sockets on this machine
        code = plan.placement.code
        # Mounts that are not in the Compose file.
        at = mounts.JOB if self.persistent else plan.placement.job_dir
        self.mounts = partial(mounts.node_mounts, run, Path(code), plan.placement.chdir, at)
        self.given_mounts = partial(folders.given_mounts, spec, run.parent.parent)
        self.cwd = plan.placement.cwd(mounts.CODE)
        # Part of a Compose file: each node's GPUs.
        self.devices = toolkit.service(toolkit.gpu_mode(daemon.info), plan.gpus)
        self.env = self._environment(plan, run)
        self.folders = folders.identities(spec) | mounts.identities(run, Path(code), at)
        if not self.env["NODE_SOCKETS"]:  # the engine may be on another kernel
            self.folders = {}
        self.nodes: dict[str, Container] = {}
        self.seen_events: dict[str, set[str]] = {}  # container id: actions in its events
        self.dying: set[str] = set()  # ids of containers that are being stopped, but are still listed as running
        self.troubles: dict[str, str] = {}  # node: paused or partition
        self.last_listed = 0.0
        self.stopped = never  # whether the job is to end
        self.guard = Guard(daemon, self.project, run, spec.ports) if wanted(spec) else None
        wants_services = spec.services and plan.job_id != plan.placement.cluster  # each job has its own
        self.services_log = JobPaths(run.parent.parent / plan.job_id).services_log
        self.services = (
            Services(daemon, plan.job_id, spec.services, self.network, spec.mask()) if wants_services else None
        )
        self.clients = NodeClients(self, warn)
        self.events = Events(daemon, self._is_ours)
        self.clients.watch(self.events.bell, self._read_events)

    def _environment(self, plan: Plan, run: Path) -> dict[str, str]:
        """Return the environment variables that the Compose file uses."""
        spec, gpu_mode = self.spec, toolkit.gpu_mode(self.daemon.info)
        return {
            "JOB_ID": self.project,
            "JOB_OWNER": str(os.getuid()),
            "NODE_MODE": "agent",
            "NODE_KEY": self.key.hex(),
            "NODE_IMAGE": plan.placement.image or spec.image,
            "NODE_PYTHON": plan.placement.python,
            "NODE_CODE": plan.placement.code,
            "NODE_JOB_DIR": str(run),
            "NODE_USER": self.daemon.user(run, spec),
            "NODE_RUNTIME": "nvidia" if plan.gpus and gpu_mode != "cdi" else self.daemon.info["DefaultRuntime"],
            "NODE_GPUS": (",".join(plan.gpus) if gpu_mode != "cdi" else "") or "void",
            "NODE_SHM": spec.shm_size,
            "NODE_MEMORY": str(plan.limits.memory),
            "NODE_TMP": str(plan.limits.tmp),
            "NODE_PIDS": str(plan.limits.processes),
            "NODE_CPUS": str(spec.cpus or 0),
            "NODE_GRACE": str(spec.grace),
            "NODE_KEEP": f"{plan.placement.keep or ''}",
            "NODE_PRELOAD": " ".join(plan.placement.preload),
            "NODE_FILTERED": "1" if wanted(spec) else "",
            "NODE_SOCKETS": SOCKETS if self._same_kernel() and sockets.possible(run.parent) else "",
        }

    def _same_kernel(self) -> bool:
        """Whether we can connect to node sockets in the run directory; their names are the nodes' host names."""
        desktop = "Docker Desktop" in self.daemon.info["OperatingSystem"]  # a virtual machine
        return sys.platform == "linux" and not desktop and self.network != "host"

    def up(self, plan: Plan, stopped: Callable[[], bool] = never) -> None:
        """Start nodes that are missing, and replace unhealthy ones."""
        self._bring_up(plan, stopped)
        if self.services:
            self.services.up(stopped)
        if self.guard and self.persistent:  # the next job does not wait for the filter
            self.guard.finish(self._healthy_nodes)
            self._warn()

    def _bring_up(self, plan: Plan, stopped: Callable[[], bool]) -> None:
        if len(self._update_nodes()) >= len(plan.nodes):
            return
        self._repair()
        if len(self._update_nodes()) >= len(plan.nodes):
            return
        scale = f"trainer={len(plan.nodes) - 1}"
        arguments = ("--detach", "--no-build", "--no-recreate", "--pull", "never", "--scale", scale)
        self._compose(stopped, "up", *arguments, "master", "trainer")
        missing = len(plan.nodes) - len(self._update_nodes())
        if missing > 0:
            raise EngineError(f"Compose did not start {missing} of {len(plan.nodes)} nodes", "see docker ps --all")

    def _repair(self) -> None:
        """Repair existing containers, which is faster than Compose; it then adds missing ones."""
        found = self._list_nodes().values()
        stuck = (node for node in found if node.status != "exited" and not self._is_healthy(node))
        self.daemon.each(stuck, Container.kill)
        with self.daemon.translating_errors("could not connect a node to its network"):
            network = self.daemon.network(self.network)
            for node in found if network else ():
                if self.network not in node.attrs["NetworkSettings"]["Networks"]:
                    alias = node.attrs["Labels"]["com.docker.compose.service"]
                    given = {"Container": node.id, "EndpointConfig": {"Aliases": [alias]}}
                    self.daemon.api.post(f"/networks/{network['Id']}/connect", given)
        self.daemon.each((node for node in found if not self._is_healthy(node)), begin)

    def _update_nodes(self) -> dict[str, Container]:
        self.nodes = self._healthy_nodes()
        return self.nodes

    def _healthy_nodes(self) -> dict[str, Container]:
        """Return the healthy nodes; start the helper container of each newly started one."""
        found = {name: node for name, node in self._list_nodes().items() if self._is_healthy(node)}
        if self.guard:
            self.guard.begin(found.values())
        return found

    def alive(self) -> dict[str, str]:
        """Return the nodes that are running and neither paused nor cut off; all are on this machine."""
        return dict.fromkeys(self._healthy_nodes(), "")

    def adopt(self, plan: Plan) -> set[int]:
        """Find the nodes by label, and take over their workers."""
        self.nodes = self._list_nodes()
        return self.clients.adopt(plan)

    def start(self, plan: Plan, stopped: Callable[[], bool] = never) -> None:
        """Start the workers on their nodes."""
        if self.guard:
            self._healthy_nodes()
            self.guard.finish(self._healthy_nodes)
        self.last_listed = self.clock.monotonic()
        self.clients.listen(0)  # earlier events are about earlier generations
        self.seen_events, self.stopped = {}, stopped
        super().start(plan)

    def wait(self, timeout: float) -> Observed:
        """Wait for exits of workers; check the containers every few seconds."""
        exits = self.clients.wait(timeout)
        if self.clients.running and self.clock.monotonic() - self.last_listed > RECONCILE_INTERVAL:
            self._reconcile()
            self.last_listed = self.clock.monotonic()
        self._warn()
        return Observed(exits, self.clients.starting(), dict(self.troubles))

    def explain(self, end: WorkerExit, node: str) -> Reason | None:
        """Return the cause, from the node's report, events, and the state of the container."""
        if why := self.clients.out_of_memory(end):
            return why
        hint = self.clients.exit_hints.get(end.rank)
        until = self.clock.monotonic() + EVENT_TIMEOUT
        while hint is None and self.clock.monotonic() < until:
            self.clients.listen(until - self.clock.monotonic())
        container = self.nodes.get(node)
        seen = self.seen_events.get(str(container.id), set()) if container else set()
        try:
            found = self._list_nodes()
        except EngineLost:
            if hint == "":  # its node is running and connected without the engine
                return None
            raise
        if not any(container.status == "running" for container in found.values()):
            self._expect_shutdown()
        runs = node in found and found[node].status == "running"
        if "oom" in seen and not runs:
            return Reason.OUT_OF_MEMORY
        if hint == "ending" or "kill" in seen or "destroy" in seen:
            if runs and "die" not in seen:  # the engine may report this later than the node
                self.dying.add(str(found[node].id))
            return Reason.NODE_STOPPED
        if not runs:
            return Reason.NODE_LOST
        return None if self._is_healthy(found[node]) else Reason.PARTITION

    def stop(self, how: Stop) -> None:
        """Stop all workers; except for a dump, first unpause nodes, whose workers could not react."""
        if how is not Stop.DUMP:
            paused = {name for name, what in self.troubles.items() if what == "paused"}
            self.daemon.each([self.nodes[name] for name in paused & self.nodes.keys()], Container.unpause)
        super().stop(how)

    def discard(self, nodes: Iterable[str]) -> None:
        """Remove nodes by force."""
        found = [self.nodes[name] for name in nodes if name in self.nodes]
        self.daemon.each(found, Container.remove)

    def down(self, grace: float, stopped: Callable[[], bool] = never) -> None:
        """Remove nodes and network, or clean up the nodes of a cluster for another job."""
        self.events.close()
        self._warn()
        if self.guard:
            self.guard.close()
        if self.services:
            self._end_services(self.services)
        if self.persistent:
            self.nodes = {name: node for name, node in self._list_nodes().items() if self._is_healthy(node)}
            self.discard(self.clients.clean(self.nodes))
            sockets.tidy(self.sockets, {str(node.short_id) for node in self.nodes.values()})
        else:  # idle nodes have no workers to stop
            objects.remove(self.daemon, self.project, grace if self.clients.running else 0, [self.sockets])

    def _end_services(self, services: Services) -> None:
        """Report services that have failed, save their output, and remove them."""
        try:
            for text in services.failures():
                self.warn(text)
            services.save_logs(self.services_log)
        except (EngineError, OSError) as error:
            self.warn(f"the output of the services is lost: {error}")
        objects.remove_services(self.daemon, services.job_id)

    def _warn(self) -> None:
        for text in self.guard.warnings() if self.guard else ():
            self.warn(text)

    # --- containers

    def _list_nodes(self) -> dict[str, Container]:
        """Return the job's containers by node; wait for those that are being killed."""
        deadline = self.clock.monotonic() + NODE_EXIT_TIMEOUT
        while True:
            self._read_events()
            found = {labels.node(node): node for node in objects.nodes_of(self.daemon, self.project)}
            if self.clock.monotonic() > deadline or not any(
                node.id in self.dying and node.status == "running" for node in found.values()
            ):
                self.dying = set()
                return found
            self.clock.sleep(0.02)

    def _is_healthy(self, container: Container) -> bool:
        """Whether a container is running, not paused, and on the job's network."""
        networks = container.attrs["NetworkSettings"]["Networks"]
        return container.status == "running" and self.network in networks

    # --- access to nodes, for their connections

    def may_recover(self, node: str) -> bool:
        """Whether the node's processes exist, as in a paused container."""
        return node in self.nodes and self.nodes[node].status in UP

    def connect(self, node: str) -> NodeConnection | None:
        """Connect to a node's socket, or through the engine; None if it is not running."""
        if node not in self.nodes:
            return None
        container = self.nodes[node]
        if container.status == "running" and self.env["NODE_SOCKETS"]:

            def comes() -> bool:
                there = self.sockets.is_dir()  # else the run directory was removed
                return there and not self.stopped() and self.daemon.started_recently(container, LISTEN_TIMEOUT)

            with contextlib.suppress(OSError, EngineError):
                return sockets.connect(self.sockets / str(container.short_id), self.key, comes)
            if self.stopped():
                return None
        return self.daemon.connect_by_exec(str(container.id), [self.env["NODE_PYTHON"], *PIPE], self.key)

    def request(self, worker: WorkerPlan, command: tuple[str, ...]) -> protocol.Start:
        """Build a request with the worker's environment, and the packet filter and mounts that must be in place."""
        filtered = self.guard is not None and self.guard.expects(self.nodes[worker.node])
        return protocol.Start(
            [*command], worker.env, inherit=True, cwd=self.cwd, filtered=filtered, folders=self.folders
        )

    def runs(self, node: str) -> bool:
        """Whether the container is still running after the connection closed."""
        found = self._list_nodes().get(node)
        if found is None or found.status not in UP:
            return False
        if found.status == "paused":
            raise EngineLost(f"{node} is paused")
        self.nodes[node] = found
        return True

    # --- events

    def _read_events(self) -> None:
        for event in self.events.taken():
            self._record_event(event)

    def _is_ours(self, event: dict[str, Any]) -> bool:
        attributes = event["Actor"]["Attributes"]
        return self.project in (attributes.get(labels.JOB), attributes.get("name", "").removesuffix("_job"))

    def _record_event(self, event: dict[str, Any]) -> None:
        """Record an event of a container; schedule a list of containers if their state may have changed."""
        action, actor, attributes = event["Action"], event["Actor"]["ID"], event["Actor"]["Attributes"]
        if action == "kill" and attributes.get("signal") in ("9", "15"):
            self.seen_events.setdefault(actor, set()).add(action)
            self.dying.add(actor)
        elif action in ("oom", "destroy", "die"):
            self.seen_events.setdefault(actor, set()).add(action)
            self.dying.discard(actor)
        if event["Type"] == "network" or action in ("pause", "unpause", "die"):
            self.last_listed = self.clock.monotonic() - RECONCILE_INTERVAL + LIST_LAG

    def _reconcile(self) -> None:
        """List the containers to find nodes that have ended, are paused, or are cut off."""
        found = self._list_nodes()
        self.troubles = {name: "paused" for name, node in found.items() if node.status == "paused"}
        cut_off = [name for name, node in found.items() if node.status == "running" and not self._is_healthy(node)]
        self.troubles |= dict.fromkeys(cut_off, "partition")
        working = set(self.clients.running.values())
        self.clients.broken |= {node for node in working if node not in found or node not in self.clients.connections}

    def _expect_shutdown(self) -> None:
        """Raise EngineLost if all nodes are gone because the daemon is stopping or was restarted."""
        deadline = self.clock.monotonic() + SHUTDOWN_TIMEOUT
        while self.clock.monotonic() < deadline:
            if self.events.broken > self.clock.monotonic() - 2 * SHUTDOWN_TIMEOUT:
                raise EngineLost("the engine was restarted")
            with self.daemon.translating_errors("does not respond"):
                self.daemon.api.get("/version")
            self.clock.sleep(0.2)

    def _compose(self, stopped: Callable[[], bool], *arguments: str) -> None:
        sockets.share(self.sockets, self.env["NODE_USER"])
        files = [PROJECT / "docker-compose.yml", *([HOST_NETWORK] if self.network == "host" else []), "-"]
        options = [word for file in files for word in ("--file", str(file))]
        command = ["--project-name", self.project, "--profile", "gpu", *options, *arguments]
        wiped = [*WIPED, compose_override.SECRETS, *volumes(self.daemon, self.env["NODE_IMAGE"], self.spec)]
        env = {**self.env, "NODE_WIPE": " ".join(wiped)}
        extra = [mounts.bind(self.sockets, SOCKETS)] if env["NODE_SOCKETS"] else []
        if (readable := program.folder(self.spec)) != PACKAGE:
            extra.append({**mounts.bind(readable, program.TARGET), "read_only": True})
        every, user = [*self.mounts(), *self.given_mounts(), *extra], self.env["NODE_USER"]
        given = compose_override.document(self.spec, every, self.devices, user)
        self.daemon.compose(*command, env=env, given=given, capture=True, stopped=stopped)
