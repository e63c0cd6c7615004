"""Connections to all nodes of a job, the same for every engine: start and stop workers, and receive their exits."""

from __future__ import annotations

import logging
import selectors
import socket
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from typing import Any, Protocol

from orchestrate.clock import Clock, wait_until
from orchestrate.engines.base import Stop
from orchestrate.engines.connection import ANSWER_TIMEOUT, NodeConnection
from orchestrate.errors import EngineLost
from orchestrate.node.messages import protocol
from orchestrate.node.worker import FAILED_TO_START
from orchestrate.plan.plan import Plan, WorkerPlan
from orchestrate.record.outcomes import LOST_EXIT_CODE, TERMINATED_EXIT_CODE, Activity, Stack, Use, WorkerExit
from orchestrate.spec import secret_files
from orchestrate.spec.causes import Reason
from orchestrate.spec.spec import JobSpec

log = logging.getLogger(__name__)

NODE_EXIT_TIMEOUT = 5.0  # maximum seconds for a node to exit
STACKS_TIMEOUT = 4.0  # seconds to wait for stacks; a node waits for two seconds
STATUS_TIMEOUT = 1.0  # seconds to wait for a status during a job; a paused node sends none


class Access(Protocol):
    """How to reach the nodes of a session."""

    spec: JobSpec
    clock: Clock
    secrets: str  # folder in nodes for secret files

    def connect(self, node: str) -> NodeConnection | None:
        """Connect to a node; None if it is not running; raises EngineLost. Must be thread-safe."""

    def runs(self, node: str) -> bool:
        """Ask the engine whether a node is still running after its connection has closed; raises EngineLost."""

    def may_recover(self, node: str) -> bool:
        """Whether a node that does not respond may do so later."""

    def request(self, worker: WorkerPlan, command: tuple[str, ...]) -> protocol.Start:
        """Build the request that starts a worker."""


class NodeClients:
    """Connections to the nodes of one job, and the state of its workers as reported by the nodes."""

    def __init__(
        self,
        access: Access,
        warn: Callable[[str], None],
        heard: Callable[[str], None] = lambda node: None,
        lost: Callable[[int, str], None] = lambda rank, node: None,
    ) -> None:
        """Connect to nodes on demand.

        `warn` is called with a message if a node refuses a request, `heard` with the node of each message, and `lost`
        with rank and node of each lost worker.
        """
        self.access, self.warn, self.heard, self.lost = access, warn, heard, lost
        self.clock = access.clock
        self.selector = selectors.DefaultSelector()
        self.connections: dict[str, NodeConnection] = {}  # by node
        self.generation = -1
        self.running: dict[int, str] = {}  # rank: node, for workers that have not ended
        self.queued: list[WorkerPlan] = []  # workers to start once they can connect to torch's store
        self.command: tuple[str, ...] = ()
        self.pids: dict[int, int] = {}  # by rank, in the PID namespace of the node
        self.exit_hints: dict[int, str] = {}  # by rank, the node's hint on the exit code, such as oom or ending
        self.ended: list[tuple[float, WorkerExit]] = []  # not yet reported, with Unix times
        self.broken: set[str] = set()  # nodes whose connection has closed
        self.statuses: dict[str, protocol.Status] = {}  # last status by node
        self.unanswered: set[str] = set()  # nodes that were asked for it and have not answered
        self.shown: dict[int, Stack] = {}  # by rank
        self.cleaned: set[str] = set()  # nodes that have confirmed their cleanup
        self.refused: set[str] = set()  # nodes whose refusal was reported; code in an image could repeat it forever

    def watch(self, sock: socket.socket, act: Callable[[], None]) -> None:
        """Call `act`, which must read from the socket, whenever it is readable while waiting for messages."""
        self.selector.register(sock, selectors.EVENT_READ, act)

    # --- workers

    def start(self, plan: Plan) -> None:
        """Start rank 0, and the other workers once its node listens for torch's store, or rank 0 has started.

        A worker that cannot connect to the store retries only after half a second.
        """
        self._reset(plan)
        self.connect(dict.fromkeys(worker.node for worker in plan.workers))
        self.command, self.queued = plan.command, list(plan.workers[1:])
        self._start(plan.workers[0])
        if self.access.spec.before:  # all nodes run it at the same time
            self._start_queued()

    def adopt(self, plan: Plan) -> set[int]:
        """Take over the running workers of a plan; return the ranks that their nodes do not know."""
        self._reset(plan)
        nodes = list(dict.fromkeys(worker.node for worker in plan.workers))
        self.connect(nodes)
        states = self.ask(nodes)
        unknown = set()
        for worker in plan.workers:
            state = states.get(worker.node)
            if state is not None:
                if not self.update_worker(worker.rank, state):
                    unknown.add(worker.rank)
            elif self.access.may_recover(worker.node):
                raise EngineLost(f"{worker.node} does not respond")
            else:
                self.mark_lost([worker.rank])
        return unknown

    def starting(self) -> set[int]:
        """Return the ranks of workers that have not started."""
        return self.running.keys() - self.pids.keys()

    def wait(self, timeout: float) -> list[WorkerExit]:
        """Return the workers that have ended since the last call, in order; waits up to `timeout` seconds."""
        self.listen(0 if self.ended else timeout)
        broken, self.broken = self.broken, set()
        self._resolve(broken)
        ended, self.ended = sorted(self.ended, key=lambda one: one[0]), []
        return [exit for _, exit in ended]

    def activity(self) -> dict[int, Activity]:
        """Report what the running workers are doing, by rank, as far as their nodes know."""
        states, found = self.ask(set(self.running.values()), STATUS_TIMEOUT), {}
        for rank, node in self.running.items():
            doing = states[node].running.get(str(rank)) if node in states else None
            if doing and doing["state"]:  # only on systems with /proc
                found[rank] = Activity(
                    doing["state"], doing["cpu"], doing.get("memory", 0), _use(states[node], rank), doing["pid"]
                )
        return found

    def stacks(self) -> dict[int, Stack]:
        """Return the stacks of the running workers, which go on, by rank."""
        states, self.shown = self.activity(), {}
        self.broadcast(protocol.GetStacks())
        self._listen_while(lambda: self.running.keys() & states.keys() - self.shown.keys(), STACKS_TIMEOUT)
        known = {rank: Stack("", protocol.SILENT, doing.state) for rank, doing in states.items()}
        return dict.fromkeys(self.running, Stack("", protocol.SILENT)) | known | self.shown

    def out_of_memory(self, end: WorkerExit) -> Reason | None:
        """Return the reason if the kernel killed a worker, or a child of it, for lack of memory."""
        if self.exit_hints.get(end.rank) != "oom":
            return None
        return Reason.OUT_OF_MEMORY if end.code == LOST_EXIT_CODE else Reason.OUT_OF_MEMORY_IN_A_CHILD

    def stop(self, how: Stop) -> None:
        """Stop all workers."""
        if how is Stop.DUMP:
            self.broadcast(protocol.Freeze())
            # Wait for all to freeze: a worker that ends would make others leave the place where they hang.
            self.ask(set(self.running.values()), STATUS_TIMEOUT)
            return self.broadcast(protocol.Dump())
        for worker in self.queued:
            self._record_exit(worker.rank, TERMINATED_EXIT_CODE, self.clock.time())
        self.queued = []
        self.broadcast(protocol.Stop(kill=how is Stop.KILL))

    def on(self, node: str) -> list[int]:
        """Return the ranks on a node that have not ended."""
        return [rank for rank, where in self.running.items() if where == node]

    def mark_lost(self, ranks: Iterable[int]) -> None:
        """Mark workers as lost with their nodes."""
        for rank in [rank for rank in ranks if rank in self.running]:
            self.lost(rank, self.running[rank])
            self._record_exit(rank, LOST_EXIT_CODE, self.clock.time())

    # --- nodes

    def connect(self, nodes: Iterable[str]) -> None:
        """Connect in parallel to running nodes that have no connection."""
        missing = [node for node in nodes if node not in self.connections]
        if not missing:
            return
        with ThreadPoolExecutor(16) as pool:
            opened = list(pool.map(self.access.connect, missing))
        for node, connection in zip(missing, opened):
            if connection:
                log.debug("connected to %s", node)
                self.connections[node] = connection
                self.selector.register(connection.sock, selectors.EVENT_READ, node)

    def drop(self, node: str) -> None:
        """Close the connection to a node; `wait` checks whether the node has ended."""
        log.debug("connection to %s closed", node)
        connection = self.connections.pop(node)
        self.selector.unregister(connection.sock)
        connection.close()
        self.broken.add(node)
        self.unanswered.discard(node)

    def wait_until_warm(self, nodes: Iterable[str], patience: float) -> bool:
        """Wait until nodes have imported the modules for workers; return False after `patience` seconds."""
        self.connect(nodes := list(nodes))

        def warm() -> bool:
            states = self.ask(nodes, STATUS_TIMEOUT)
            return len(states) == len(nodes) and not any(state.importing for state in states.values())

        return wait_until(warm, patience, self.clock, 0.05)

    def clean(self, nodes: Iterable[str]) -> set[str]:
        """Clean up nodes for another job; return those without confirmation, where processes of the job may remain."""
        nodes, self.cleaned = set(nodes), set()
        self.connect(nodes)
        self.broadcast(protocol.Clean())
        self._listen_while(lambda: (nodes & self.connections.keys()) - self.cleaned, ANSWER_TIMEOUT)
        return nodes - self.cleaned

    def ask(self, nodes: Iterable[str], patience: float = ANSWER_TIMEOUT) -> dict[str, protocol.Status]:
        """Return the status of each node that responds within `patience` seconds.

        A node that has not answered the last question is not asked again: it may read nothing.
        """
        self.statuses = {}
        asked = {node for node in nodes if node in self.unanswered or self._send(node, protocol.GetStatus())}
        self.unanswered |= asked
        self._listen_while(lambda: (asked & self.connections.keys()) - self.statuses.keys(), patience)
        return self.statuses

    def broadcast(self, request: protocol.Request) -> None:
        """Send a request to all connected nodes."""
        for node in list(self.connections):
            self._send(node, request)

    def listen(self, timeout: float) -> None:
        """Receive messages from nodes; returns after the first ones."""
        for key, _ in self.selector.select(timeout):
            if callable(key.data):
                key.data()
                continue
            reports = self.connections[key.data].receive() if key.data in self.connections else []
            if reports is None:
                self.drop(key.data)
            for report in reports or ():
                self._handle(key.data, report)

    # --- details

    def _listen_while(self, missing: Callable[[], object], patience: float) -> None:
        """Receive messages while something is missing, for `patience` seconds at most."""
        deadline = self.clock.monotonic() + patience
        while missing() and self.clock.monotonic() < deadline:
            self.listen(0.1)

    def _resolve(self, nodes: set[str]) -> None:
        """Handle closed connections: either the node has ended, even if it is still listed, or only the connection.

        All nodes at once: one that accepts connections but sends nothing uses the whole time limit.
        """
        deadline = self.clock.monotonic() + NODE_EXIT_TIMEOUT
        while nodes:
            alive = {node for node in nodes if self.clock.monotonic() < deadline and self.access.runs(node)}
            self.mark_lost(rank for node in nodes - alive for rank in self.on(node))
            self.connect(alive)
            states = dict(self.ask(alive))
            for node, state in states.items():
                self.mark_lost([rank for rank in self.on(node) if not self.update_worker(rank, state)])
            nodes = alive - states.keys()
            if nodes:
                self.clock.sleep(0.02)

    def update_worker(self, rank: int, state: protocol.Status) -> bool:
        """Update a worker from a node's status; return False if the node does not know it."""
        name = str(rank)
        if state.generation != self.generation or name not in state.codes | state.running:
            return False
        if name in state.codes:
            self.exit_hints[rank] = state.hints.get(name, "")
            self._record_exit(rank, state.codes[name], self.clock.time(), use=_use(state, rank))
        elif pid := state.running[name]["pid"]:
            self.pids[rank] = pid
        return True

    def _send(self, node: str, request: protocol.Request) -> bool:
        """Send a request to a node; return False if there is no connection."""
        if node not in self.connections:
            return False
        if self.connections[node].send(request):
            return True
        self.drop(node)
        return False

    def _reset(self, plan: Plan) -> None:
        self.listen(0)  # detect closed connections now, before a new node has the same name
        self.generation = plan.generation
        self.running = {worker.rank: worker.node for worker in plan.workers}
        self.queued, self.pids, self.exit_hints, self.ended = [], {}, {}, []
        self.broken, self.refused = set(), set()

    def _start(self, worker: WorkerPlan) -> None:
        spec, request = self.access.spec, self.access.request(worker, self.command)
        if spec.contents:
            paths = {name: f"{self.access.secrets}/{name}" for name in spec.contents}
            env = secret_files.variables(spec, self.access.secrets) | request.env
            request = request._replace(env=env, secrets={path: spec.contents[name] for name, path in paths.items()})
        if spec.before:
            request = request._replace(before=[*spec.before])
        if not self._send(worker.node, request):
            self.mark_lost([worker.rank])

    def _start_queued(self) -> None:
        queued, self.queued = self.queued, []
        for worker in queued:
            self._start(worker)

    def _handle(self, node: str, report: protocol.Report) -> None:
        """Process a report of a node."""
        self.heard(node)
        if isinstance(report, protocol.Status):
            self.statuses[node] = report
            self.unanswered.discard(node)
        elif isinstance(report, protocol.Cleaned):
            self.cleaned.add(node)
        elif isinstance(report, protocol.Refusal):
            if node not in self.refused:
                self.refused.add(node)
                self.warn(f"{node} refused a request: {protocol.reason(report.error)}")
            for rank in [rank for rank in self.on(node) if rank not in self.pids]:
                self._record_exit(rank, FAILED_TO_START, self.clock.time(), stopping=False)
        elif (
            not isinstance(report, protocol.Started | protocol.Listening | protocol.Stack | protocol.Ended)
            or report.generation != self.generation
        ):
            return  # from an earlier generation
        elif isinstance(report, protocol.Listening):
            if self.running.get(0) == node:
                self._start_queued()
        elif self.running.get(report.rank) != node:
            return  # its exit was recorded already, or it belongs to another node
        elif isinstance(report, protocol.Stack):
            self.shown[report.rank] = Stack(report.text[: protocol.MAX_STACK], report.why)
        elif isinstance(report, protocol.Started):
            self.pids[report.rank] = report.pid
            self._start_queued()
        else:
            self.exit_hints[report.rank] = report.hint
            self._record_exit(report.rank, report.code, report.at, report.stopping, _as_use(report.use))

    def _record_exit(self, rank: int, code: int, at: float, stopping: bool = True, use: Use | None = None) -> None:
        if self.running.pop(rank, None) is not None:
            self.ended.append((at, WorkerExit(rank, code, stopping, use)))


def _use(state: protocol.Status, rank: int) -> Use | None:
    return _as_use((state.uses or {}).get(str(rank)))


def _as_use(facts: dict[str, Any] | None) -> Use | None:
    return Use(**{field.name: facts[field.name] for field in fields(Use) if field.name in facts}) if facts else None
