"""Tasks of Docker Swarm as nodes of a job, on several hosts.

Only Swarm's own ports must be open between hosts, and no daemon listens on the network: nodes are reached through a
relay, a small container on this host that is on the job's network. Hosts need not share a folder.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from concurrent import futures
from pathlib import Path
from typing import BinaryIO

from orchestrate.clock import wait_until
from orchestrate.engines.base import Observed, never
from orchestrate.engines.client_session import ClientSession, key_of
from orchestrate.engines.connection import ANSWER_TIMEOUT, NodeConnection
from orchestrate.engines.node_clients import NodeClients
from orchestrate.engines.swarm import service_spec
from orchestrate.engines.swarm.last_lines import rescued
from orchestrate.engines.swarm.manager import ApiObject, Manager, ended, failed, is_healthy, is_starting
from orchestrate.engines.swarm.objects import SwarmJob
from orchestrate.engines.swarm.sync import FileSync
from orchestrate.engines.swarm.upload import code_files, has_archive, on_each, packed, send_archive, send_written
from orchestrate.errors import EngineError
from orchestrate.files.folder import Folder
from orchestrate.files.paths import log
from orchestrate.host import records
from orchestrate.node.messages import protocol
from orchestrate.node.trees import opened
from orchestrate.plan import container
from orchestrate.plan.plan import Plan, WorkerPlan
from orchestrate.record.outcomes import WorkerExit
from orchestrate.spec.causes import Reason
from orchestrate.spec.spec import JobSpec

LIST_INTERVAL = 2.0  # seconds between two lists of Swarm's tasks and hosts
SILENT_AFTER = 6.0  # seconds without a message until a node counts as silent
START_TIMEOUT, PULL_TIMEOUT = 120.0, 3600.0  # seconds to start the nodes, and to pull the image before that
PENDING_TIMEOUT = 8.0  # seconds that a task may be pending, and during which tasks that fail to start are replaced
NODE_END_TIMEOUT = 2.0  # seconds for a node without workers to end
UNCLEAN_TIMEOUT = 20.0  # seconds for a node that cannot be cleaned to end, as Swarm reports it
FIRST_CONNECT_TIMEOUT, RECONNECT_TIMEOUT = 20.0, 2.0  # seconds for a node to accept a connection, at first and later
HOST_DOWN_TIMEOUT = 25.0  # seconds until Swarm reports that a host is down; it needs 15
# Seconds until a node that is cut off has killed its workers.
LEASE_OVER_AFTER = protocol.LEASE_TIMEOUT + 2 * protocol.RENEW_INTERVAL + 2 * protocol.SEND_TIMEOUT
TASK_END_TIMEOUT = 3.0  # seconds for Swarm to report the end of a task that does not respond
LOG_TIMEOUT = 5.0  # seconds for Swarm to return the last lines of a lost task
LAST_LINES_TIMEOUT = 10.0  # seconds to copy the last lines of workers
SYNC_TIMEOUT = 3600.0  # seconds to copy all files of a job at its end
HURRIED_SYNC_TIMEOUT = 5.0  # the same after a second request to stop; files that are not copied stay on their nodes
PORTS = "7946/tcp, 7946/udp and 4789/udp must be open between the hosts: python -m orchestrate doctor"
PIPE = ["python", *container.PIPE]


class SwarmSession(ClientSession):
    """The nodes of one job."""

    secrets = service_spec.SECRETS

    def __init__(self, manager: Manager, spec: JobSpec, plan: Plan, run: Path, warn: Callable[[str], None]) -> None:
        """`run` contains the job's files; raises EngineError if the job has no key."""
        self.warn, self.key, self.manager, self.spec, self.clock = warn, key_of(run), manager, spec, manager.clock
        self.swarm = SwarmJob(manager, spec, plan, run, self.key)
        self.persistent = bool(plan.placement.cluster)  # whether the nodes outlive the job
        self.shared = bool(spec.volume)  # whether all hosts share the job folder
        self.files = run / plan.job_id if self.persistent and plan.project != plan.job_id else run
        self.here = Folder(self.files.parent, self.files.name, records.inode(self.files.parent))
        self.job_dir = plan.placement.job_dir  # the job folder in nodes
        self.workdir = plan.placement.cwd(service_spec.CODE)  # the working directory of workers
        self.clients = NodeClients(self, warn, self._heard, self._lost)
        self.nodes: dict[str, ApiObject] = {}  # task by node
        self.asked: dict[str, float] = {}  # node: time of the first unanswered request
        self.linked: dict[str, str] = {}  # node: id of the connected task
        self.last_heard: dict[str, float] = {}  # node: time of its last message
        self.first, self.last_listed = "", 0.0  # node of rank 0; time when tasks were listed last
        self.lease_ends: dict[str, float] = {}  # id of a lost task: time when its lease has expired
        self.kept = contextlib.ExitStack()
        self.code: tuple[BinaryIO, str] | None = None  # tar file and its digest
        self.pool = futures.ThreadPoolExecutor(1)
        self.lost: dict[int, str] = {}  # rank: node, for lost workers whose last lines may be missing
        self.have_code: set[str] = set()  # ids of tasks that have the code
        self.abandoned: set[str] = set()  # ids of tasks that count as lost, since they do not respond
        self.sync: FileSync | None = None
        self.copied: dict[str, str] = {}  # node: id of the task whose files it copies
        self.cut_off: set[str] = set()  # ids of tasks whose hosts were down at some time

    def up(self, plan: Plan, stopped: Callable[[], bool] = never) -> None:
        """Start nodes that are missing, replace unhealthy ones, and send them the code."""
        self.swarm.prepare()
        began = self.clock.monotonic()
        found = self._update_nodes()
        there = {name: task["ID"] for name, task in self.nodes.items() if name in found or is_starting(task)}
        old = {task["ID"] for task in self.swarm.tasks()} - {*there.values()}
        for role, wanted in (("trainer", len(plan.nodes) - 1), ("master", 1)):
            self.swarm.scale(role, wanted - sum(name.startswith(role) for name in there))
        self.swarm.connect()
        while len(found) < len(plan.nodes):
            late = self.clock.monotonic() - began > PENDING_TIMEOUT
            self.swarm.replace(old, self.manager.lost)
            why = self.swarm.refusal(old, impatient=late)
            if why and (late or not self.swarm.replace(old, failed)):
                raise EngineError(*why)
            pulls = any(is_starting(task) and task["Status"]["State"] == "preparing" for task in self.nodes.values())
            if stopped() or self.clock.monotonic() - began > (PULL_TIMEOUT if pulls else START_TIMEOUT):
                raise EngineError(f"{len(plan.nodes) - len(found)} of {len(plan.nodes)} nodes did not start")
            self.clock.sleep(0.1)
            found = self._update_nodes()
        self._send_code(Path(plan.placement.code), found, stopped)

    def alive(self) -> dict[str, str]:
        """Return the nodes that have the code, on hosts that are up, with their hosts."""
        found = self._update_nodes().items()
        return {name: self.manager.host(task) for name, task in found if task["ID"] in self.have_code}

    def adopt(self, plan: Plan) -> set[int]:
        """Find the nodes by their services, and take over their workers."""
        self.swarm.prepare()
        self.swarm.connect()
        self._update_nodes()
        self.have_code |= {self._task_id(worker.node) for worker in plan.workers}
        self._start_sync(plan.workers)  # first: nodes may have files though they do not respond now
        return self.clients.adopt(plan)

    def gather(self, stopped: Callable[[], bool]) -> None:
        """Copy all files here: the next generation starts with the local files, not those on the nodes."""
        if self.sync:
            done = self.sync.catch_up(SYNC_TIMEOUT, stopped)
            self.sync.lacks_space()
            if done and (why := self.sync.failed()):
                self.warn(f"the next generation starts without the last files of this one: {why}")
            for node in self._still_running(self.sync.silent()) if done else ():
                self.warn(f"the next generation starts without the last files of {node}, which does not respond")

    def start(self, plan: Plan, stopped: Callable[[], bool] = never) -> None:
        """Send the files of earlier generations to every node, and start the workers on those that have them."""
        self.first = plan.workers[0].node
        if self.sync:
            self.sync.close()
        while {task for task, until in self.lease_ends.items() if self.clock.monotonic() < until} - self.swarm.dead():
            self.clock.sleep(0.2)  # an older generation may still run on a node that is cut off
        self.lease_ends, self.asked = {}, {}
        self._update_nodes()
        self._send_files(plan.workers, stopped)
        for node, task in [(node, self.linked[node]) for node in self.clients.connections]:
            if task != self._task_id(node) or task in self.abandoned:  # replaced by a new task, or lost
                self.clients.drop(node)
        self._start_sync(plan.workers)
        self.clients.start(plan)

    def wait(self, timeout: float) -> Observed:
        """Wait for exits of workers; after the last one, also wait until the last lines of their logs are here."""
        exits = self.clients.wait(timeout)
        if exits and self.sync and not self.clients.running:
            self.sync.catch_up(LAST_LINES_TIMEOUT)
            self._complete_logs()
        if self.clients.running and self.clock.monotonic() - self.last_listed > LIST_INTERVAL:
            self.last_listed = self.clock.monotonic()
            self._check_nodes()
        self._warn()
        silent = filter(self._is_silent, self.clients.running.values())
        return Observed(exits, self.clients.starting(), dict.fromkeys(silent, "silent"))  # Swarm reports them later

    def _check_nodes(self) -> None:
        self._update_nodes()
        self.clients.broken |= set(self.clients.running.values()) - self.clients.connections.keys()
        for node in filter(self._is_down, list(self.clients.connections)):
            self.clients.drop(node)
        for node, since in list(self.asked.items()):
            # Swarm has not reported the host: only the nodes' network is cut.
            if self.clock.monotonic() - since > HOST_DOWN_TIMEOUT:
                self._abandon(node)
        self.clients.broadcast(protocol.GetStatus())  # serves as a heartbeat
        self.asked = dict.fromkeys(self.clients.connections, self.clock.monotonic()) | self.asked

    def explain(self, end: WorkerExit, node: str) -> Reason | None:
        """Return the cause, from the node's report, or the state of its task and host."""
        if why := self.clients.out_of_memory(end):
            return why
        hint = self.clients.exit_hints.get(end.rank)
        if hint is not None:  # its node is alive, or reported that it ends
            return {"cut off": Reason.HOST_LOST, "ending": Reason.NODE_STOPPED}.get(hint)
        deadline = self.clock.monotonic() + HOST_DOWN_TIMEOUT
        while True:
            self._update_nodes()
            task = self.nodes.get(node)
            if task and task["ID"] in self.abandoned | self.cut_off:
                return Reason.HOST_LOST
            if not task or not is_healthy(task):
                return Reason.NODE_LOST
            if node in self.clients.connections or self.clock.monotonic() > deadline:
                return None if node in self.clients.connections else Reason.HOST_LOST
            self.clock.sleep(0.2)

    def discard(self, nodes: Iterable[str]) -> None:
        """Kill what runs on nodes, and abandon them: Swarm cannot remove a single task, so that is done at the end."""
        for name in nodes:
            if name in self.clients.connections:
                self.clients.connections[name].send(protocol.Stop(kill=True, leftovers=True))
                if self.persistent:  # otherwise, they may still have files
                    self.clients.connections[name].send(protocol.End())
            self._abandon(name)

    def down(self, grace: float, stopped: Callable[[], bool] = never) -> None:
        """Copy all files here, then remove services, network and relay."""
        if self.sync:
            # If files stay on a node, no program of the job does.
            self.clients.broadcast(protocol.Stop(kill=True, leftovers=True))
            if self._running_nodes():
                self.sync.copy_all(*((SYNC_TIMEOUT, stopped) if grace else (HURRIED_SYNC_TIMEOUT, never)))
            silent = self.sync.silent()
            wait_until(lambda: not self._still_running(silent), TASK_END_TIMEOUT, self.clock, 0.2)
            for node in self._still_running(silent):
                raise EngineError(f"the files of {node} could not be copied: it does not respond", PORTS)
            for node in sorted(silent):
                self.warn(f"the last files of {node} may be missing: it ended before they were copied")
            self._warn()
            self.sync.close()
            self.sync = None
        if self.persistent:
            self.abandoned.clear()  # a node that was lost may respond again, and still have processes of the job
            unclean = self.clients.clean(self._update_nodes())
            self.discard(unclean)
            if not wait_until(lambda: not self._any_runs(self.nodes, unclean), UNCLEAN_TIMEOUT, self.clock, 0.2):
                why = f"{', '.join(sorted(unclean))} could not be cleaned: what the job has started may still run there"
                raise EngineError(why, f"python -m orchestrate down {self.swarm.project}")
        else:
            self._remove(grace)

    def _remove(self, grace: float) -> None:
        known = set(self.clients.connections)
        # Swarm takes four seconds to end a task, two of them idle.
        self.clients.broadcast(protocol.End())
        deadline = self.clock.monotonic() + grace + NODE_END_TIMEOUT
        while known & self._update_nodes().keys() and self.clock.monotonic() < deadline:
            self.clients.listen(0.1)
        for node in list(self.clients.connections):
            self.clients.drop(node)
        self.manager.remove(self.swarm.project, grace)

    # --- details

    def _warn(self) -> None:
        for text in self.sync.warnings() if self.sync else ():
            self.warn(text)

    def _running_nodes(self) -> dict[str, ApiObject]:
        """List the nodes again; return those that run, as far as Swarm knows, though they may not respond."""
        self.nodes = self.swarm.look()
        self.cut_off |= {task["ID"] for task in self.nodes.values() if not self.manager.answers(task)}
        return {name: task for name, task in self.nodes.items() if is_healthy(task) and self.manager.answers(task)}

    def _still_running(self, nodes: set[str]) -> list[str]:
        running = self._running_nodes() if nodes else {}
        return sorted(node for node in nodes & running.keys() if running[node]["ID"] == self.copied.get(node))

    def _update_nodes(self) -> dict[str, ApiObject]:
        """List the nodes again; return the healthy ones."""
        return {name: task for name, task in self._running_nodes().items() if task["ID"] not in self.abandoned}

    def _heard(self, node: str) -> None:
        self.asked.pop(node, None)
        self.last_heard[node] = self.clock.monotonic()

    def _lost(self, rank: int, node: str) -> None:
        """Record that the last lines of a worker may be missing, and until when it may still run on its host."""
        self.lost[rank] = node
        if node in self.nodes:
            heard = self.last_heard.get(node, self.clock.monotonic())
            self.lease_ends[self.nodes[node]["ID"]] = heard + LEASE_OVER_AFTER

    def _task_id(self, node: str) -> str:
        """Return the id of a node's task when last listed."""
        return str(self.nodes[node]["ID"]) if node in self.nodes else ""

    def _is_down(self, node: str) -> bool:
        """Whether a node's task had ended, or its host was down, when last listed."""
        task = self.nodes.get(node)
        return task is not None and (ended(task) or not self.manager.answers(task))

    def _is_silent(self, node: str) -> bool:
        """Whether a node has not answered for a while, or counts as lost for that reason."""
        now = self.clock.monotonic()
        return now - self.asked.get(node, now) > SILENT_AFTER or self._task_id(node) in self.abandoned

    def _abandon(self, node: str) -> None:
        """Mark a node's task as lost, and close the connection."""
        self.asked.pop(node, None)
        self.abandoned |= {self._task_id(node)} - {""}
        if self.sync:
            self.sync.give_up(node)
        if node in self.clients.connections:
            self.clients.drop(node)

    def _complete_logs(self) -> None:
        """Complete the logs of lost workers from Swarm's log, if it responds soon."""
        lost, self.lost = self.lost, {}
        tasks = self.swarm.look() if lost else {}
        # The log of a task is complete once Swarm reports its end; a task may run on that only does not respond.
        ending = [node for node in lost.values() if self._task_id(node) not in self.abandoned]
        wait_until(lambda: not ending or not self._any_runs(tasks, ending), TASK_END_TIMEOUT, self.clock, 0.2)
        for rank, node in lost.items():
            task, (below, _, name) = tasks.get(node), log(rank).rpartition("/")
            asked = self.pool.submit(self.swarm.output, task) if task and self.manager.answers(task) else None
            with (
                contextlib.suppress(futures.TimeoutError, OSError),
                self.here.opened(below) as folder,
                os.fdopen(opened(name, os.O_RDWR, folder), "r+b") as file,
            ):
                file.seek(max(0, file.seek(0, os.SEEK_END) - (1 << 16)))
                file.write(rescued(file.read(), asked.result(LOG_TIMEOUT) if asked else b"", rank))

    def _any_runs(self, tasks: dict[str, ApiObject], nodes: Iterable[str]) -> bool:
        """Whether one of these tasks still runs, as far as Swarm knows."""
        wanted = {tasks[node]["ID"] for node in nodes if node in tasks}
        found = [task for task in self.swarm.look().values() if task["ID"] in wanted]
        return any(is_healthy(task) and self.manager.answers(task) for task in found)

    # --- access to nodes, for their connections

    def runs(self, node: str) -> bool:
        """Whether the node's task is still running after the connection closed."""
        return node in self._update_nodes()

    may_recover = runs

    def connect(self, node: str) -> NodeConnection | None:
        """Connect to a node through the relay; None if it is not running, or counts as lost."""
        self.linked[node] = self._task_id(node)
        return None if self.linked[node] in self.abandoned else self.reach(node)

    def reach(self, node: str, wanted: str = "") -> NodeConnection | None:
        """Connect to a node through the relay, and send it the relay's address for its lease.

        Returns None if it is not running, or is not the `wanted` task.
        """
        task, relay = self.nodes.get(node), self.swarm.relay
        if task is None or relay is None or self._is_down(node) or wanted not in ("", task["ID"]):
            return None
        address, port = self.swarm.node_address(task)
        patience = RECONNECT_TIMEOUT if task["ID"] in self.have_code else FIRST_CONNECT_TIMEOUT
        command = [*PIPE, address, str(port), str(patience)]
        if link := self.manager.daemon.connect_by_exec(str(relay.id), command, self.key, patience + ANSWER_TIMEOUT):
            link.send(protocol.Lease(self.swarm.relay_address()))
        return link

    def request(self, worker: WorkerPlan, command: tuple[str, ...]) -> protocol.Start:
        """Build a request with the worker's environment, and the length of its local log."""
        env = worker.env
        if self.swarm.network == "host":  # nodes have no host names there
            env = env | {"MASTER_ADDR": self.swarm.node_address(self.nodes[self.first])[0]}
        length = self.here.size(log(worker.rank))
        return protocol.Start([*command], env, inherit=True, cwd=self.workdir, log=length)

    def _on_each(self, nodes: Iterable[str], act: Callable[[NodeConnection], None]) -> list[EngineError]:
        """Call `act` with a new connection to each node, in parallel; abandon nodes for which it fails."""

        def reached(node: str) -> NodeConnection:
            if link := self.reach(node):
                return link
            raise EngineError(f"cannot connect to {node} on {self.manager.host(self.nodes[node])}", PORTS)

        failed = on_each(nodes, reached, act)
        self.abandoned |= {self.nodes[node]["ID"] for node in failed}
        return [*failed.values()]

    def _send_code(self, code: Path, nodes: Iterable[str], stopped: Callable[[], bool] = never) -> None:
        """Send the code, as of the first call, to nodes without it; raises EngineError, ResourceError."""
        if self.code is None:
            run = self.swarm.run.parent
            self.code = self.kept.enter_context(packed(code, code_files(code, run.parent), run))
        file, digest = self.code

        def act(link: NodeConnection) -> None:
            if not has_archive(link, self.workdir, digest):
                send_archive(link, self.workdir, file, digest, stopped)

        for error in self._on_each(nodes, act):
            raise error
        self.have_code |= {self.nodes[name]["ID"] for name in nodes}

    def _send_files(self, workers: tuple[WorkerPlan, ...], stopped: Callable[[], bool] = never) -> None:
        """Send the files of earlier generations to every node, unless all nodes share a folder."""
        nodes = dict.fromkeys(worker.node for worker in workers)
        if not self.shared:
            scratch = self.swarm.run.parent
            send_written(self.files, self.job_dir, scratch, lambda act: self._on_each(nodes, act), stopped)

    def _start_sync(self, workers: tuple[WorkerPlan, ...]) -> None:
        """Start copying the files of nodes here."""
        nodes = dict.fromkeys(worker.node for worker in workers)
        ranks = {node: [worker.rank for worker in workers if worker.node == node] for node in nodes}
        if self.sync:
            self.sync.close()
        # A node that replaces one of the same name has none of the files, which does not mean that they were deleted.
        self.copied = {node: self._task_id(node) for node in nodes}
        self.sync = FileSync(self.files, self.job_dir, ranks, lambda node: self.reach(node, self.copied[node]))
