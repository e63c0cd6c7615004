"""The connections to all nodes of a job, the same for every engine: start and stop workers, and learn of their ends."""

from __future__ import annotations

import logging
import selectors
import socket
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from orchestrate.engines.base import Stop
from orchestrate.engines.connection import ANSWER_TIMEOUT, NodeConnection
from orchestrate.errors import EngineError, EngineLost, UsageError
from orchestrate.files import records
from orchestrate.job.outcomes import LOST, TERMINATED, Doing, Reason, WorkerExit
from orchestrate.job.plan import Plan, WorkerPlan
from orchestrate.node import protocol
from orchestrate.node.worker import FAILED_TO_START

log = logging.getLogger(__name__)

NODE_EXIT_TIMEOUT = 5.0  # seconds that a node takes to die, at most
STATUS_TIMEOUT = 1.0  # seconds that it may take to report its workers while the job goes on; a paused node does not


class Access(Protocol):
    """How a session reaches its nodes, and what it knows of them."""

    def connect(self, node: str) -> NodeConnection | None:
        """Connect to a node; None if it does not run; raises EngineLost. Must be thread-safe."""

    def runs(self, node: str) -> bool:
        """Ask the engine whether a node whose connection has ended still runs; raises EngineLost."""

    def may_recover(self, node: str) -> bool:
        """Whether a node that does not answer may do so later."""

    def request(self, worker: WorkerPlan, command: tuple[str, ...]) -> protocol.Start:
        """What a node is sent to start a worker."""


class NodeClients:
    """Connections to the nodes of one job, and its workers, as their nodes report them."""

    def __init__(
        self,
        access: Access,
        warn: Callable[[str], None],
        heard: Callable[[str], None] = lambda node: None,
        lost: Callable[[int, str], None] = lambda rank, node: None,
    ) -> None:
        """Connect to nodes as they are needed.

        `warn` is told which requests nodes refuse; `heard` of each message, by its node; `lost` of each worker that is
        given up, by rank and node.
        """
        self.access, self.warn, self.heard, self.lost = access, warn, heard, lost
        self.selector = selectors.DefaultSelector()
        self.connections: dict[str, NodeConnection] = {}  # by node
        self.generation = -1
        self.running: dict[int, str] = {}  # rank: node, of workers that have not ended
        self.queued: list[WorkerPlan] = []  # workers that start as soon as rank 0 has started
        self.command: tuple[str, ...] = ()
        self.pids: dict[int, int] = {}  # by rank, as the node sees them
        self.exit_hints: dict[int, str] = {}  # by rank, what its node adds to the exit code, such as oom or ending
        self.ended: list[tuple[float, WorkerExit]] = []  # in seconds since 1970; not yet reported
        self.broken: set[str] = set()  # nodes whose connection has ended
        self.statuses: dict[str, protocol.Status] = {}  # by node, its last status
        self.cleaned: set[str] = set()  # nodes that have reported that they are clean
        self.refused: set[str] = set()  # nodes of which a refusal is known; code of an image could repeat it for ever

    def watch(self, sock: socket.socket, act: Callable[[], None]) -> None:
        """Call `act` whenever a socket is readable while messages are waited for; it must read from the socket."""
        self.selector.register(sock, selectors.EVENT_READ, act)

    # --- workers

    def start(self, plan: Plan) -> None:
        """Start the workers on their nodes, the others as soon as rank 0 has started.

        Rank 0 opens torch's store; a worker that cannot connect to it waits half a second before it tries again.
        """
        self._expect(plan)
        self.connect(dict.fromkeys(worker.node for worker in plan.workers))
        self.command, self.queued = plan.command, list(plan.workers[1:])
        self._start(plan.workers[0])

    def adopt(self, plan: Plan) -> set[int]:
        """Take over the workers of a plan that run already; return the ranks that their nodes do not know."""
        self._expect(plan)
        nodes = list(dict.fromkeys(worker.node for worker in plan.workers))
        self.connect(nodes)
        states = self.ask(nodes)
        strangers = set()
        for worker in plan.workers:
            state = states.get(worker.node)
            if state is not None:
                if not self.know(worker.rank, state):
                    strangers.add(worker.rank)
            elif self.access.may_recover(worker.node):
                raise EngineLost(f"{worker.node} does not answer")
            else:
                self.lose([worker.rank])
        return strangers

    def starting(self) -> set[int]:
        """The ranks of the workers that have not started yet."""
        return self.running.keys() - self.pids.keys()

    def wait(self, timeout: float) -> list[WorkerExit]:
        """The workers that have ended since the last call, in the order of their ends."""
        self.listen(0 if self.ended else timeout)
        broken, self.broken = self.broken, set()
        self._judge(broken)
        ended, self.ended = sorted(self.ended, key=lambda one: one[0]), []
        return [exit for _, exit in ended]

    def doing(self) -> dict[int, Doing]:
        """What the running workers are doing, as far as their nodes say."""
        states, found = self.ask(set(self.running.values()), STATUS_TIMEOUT), {}
        for rank, node in self.running.items():
            doing = states[node].running.get(str(rank)) if node in states else None
            if doing and doing["state"]:  # only if there is /proc
                found[rank] = Doing(doing["state"], doing["cpu"])
        return found

    def out_of_memory(self, end: WorkerExit) -> Reason | None:
        """Whether the kernel has killed a worker, or a child of it, for lack of memory, as its node says."""
        if self.exit_hints.get(end.rank) != "oom":
            return None
        return Reason.OUT_OF_MEMORY if end.code == LOST else Reason.OUT_OF_MEMORY_IN_A_CHILD

    def stop(self, how: Stop) -> None:
        """Ask all workers to end."""
        if how is Stop.DUMP:
            self.tell(protocol.Freeze())
            # Else one that ends would let others leave where they stand.
            self.ask(set(self.running.values()), STATUS_TIMEOUT)
            return self.tell(protocol.Dump())
        for worker in self.queued:
            self._ended(worker.rank, TERMINATED, time.time())
        self.queued = []
        self.tell(protocol.Stop(kill=how is Stop.KILL))

    def on(self, node: str) -> list[int]:
        """The ranks on a node that have not ended."""
        return [rank for rank, where in self.running.items() if where == node]

    def lose(self, ranks: Iterable[int]) -> None:
        """Count workers as lost, with their nodes."""
        for rank in [rank for rank in ranks if rank in self.running]:
            self.lost(rank, self.running[rank])
            self._ended(rank, LOST, time.time())

    # --- nodes

    def connect(self, nodes: Iterable[str]) -> None:
        """Connect in parallel to the nodes that run and have no connection yet."""
        lacking = [node for node in nodes if node not in self.connections]
        if not lacking:
            return
        with ThreadPoolExecutor(16) as pool:
            made = list(pool.map(self.access.connect, lacking))
        for node, connection in zip(lacking, made):
            if connection:
                log.debug("connected to %s", node)
                self.connections[node] = connection
                self.selector.register(connection.sock, selectors.EVENT_READ, node)

    def drop(self, node: str) -> None:
        """Close the connection to a node; `wait` finds out whether the node has ended."""
        log.debug("the connection to %s has ended", node)
        connection = self.connections.pop(node)
        self.selector.unregister(connection.sock)
        connection.close()
        self.broken.add(node)

    def warmed(self, nodes: Iterable[str], patience: float) -> bool:
        """Wait until nodes have imported what workers will need; False if some have not within `patience` seconds."""
        self.connect(nodes := list(nodes))
        deadline = time.monotonic() + patience
        while True:
            states = self.ask(nodes, STATUS_TIMEOUT)
            if len(states) == len(nodes) and not any(state.importing for state in states.values()):
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)

    def clean(self, nodes: Iterable[str]) -> set[str]:
        """Clean up nodes for another job; return those that do not confirm it: processes of the job may run there."""
        nodes, self.cleaned = set(nodes), set()
        self.connect(nodes)
        self.tell(protocol.Clean())
        deadline = time.monotonic() + ANSWER_TIMEOUT
        while (nodes & self.connections.keys()) - self.cleaned and time.monotonic() < deadline:
            self.listen(0.1)
        return nodes - self.cleaned

    def ask(self, nodes: Iterable[str], patience: float = ANSWER_TIMEOUT) -> dict[str, protocol.Status]:
        """The status of the nodes that answer."""
        self.statuses = {}
        asked = {node for node in nodes if self._send(node, protocol.GetStatus())}
        deadline = time.monotonic() + patience
        while (asked & self.connections.keys()) - self.statuses.keys() and time.monotonic() < deadline:
            self.listen(0.1)
        return self.statuses

    def tell(self, request: protocol.Request) -> None:
        """Send a request to all nodes that have a connection."""
        for node in list(self.connections):
            self._send(node, request)

    def listen(self, timeout: float) -> None:
        """Receive messages of nodes; returns after the first ones."""
        for key, _ in self.selector.select(timeout):
            if callable(key.data):
                key.data()
                continue
            said = self.connections[key.data].receive() if key.data in self.connections else []
            if said is None:
                self.drop(key.data)
            for message in said or ():
                self._take(key.data, message)

    # --- details

    def _judge(self, nodes: set[str]) -> None:
        """Handle the end of connections: the nodes have ended, even if they are still listed, or the connections alone.

        All at once: a node that takes connections and says nothing takes as long as it may.
        """
        deadline = time.monotonic() + NODE_EXIT_TIMEOUT
        while nodes:
            alive = {node for node in nodes if time.monotonic() < deadline and self.access.runs(node)}
            self.lose(rank for node in nodes - alive for rank in self.on(node))
            self.connect(alive)
            states = dict(self.ask(alive))
            for node, state in states.items():
                self.lose([rank for rank in self.on(node) if not self.know(rank, state)])
            nodes = alive - states.keys()
            if nodes:
                time.sleep(0.02)

    def know(self, rank: int, state: protocol.Status) -> bool:
        """Take over a node's status of a worker; False if the node does not know it."""
        word = str(rank)
        if state.generation != self.generation or word not in state.codes | state.running:
            return False
        if word in state.codes:
            self.exit_hints[rank] = state.hints.get(word, "")
            self._ended(rank, state.codes[word], time.time())
        elif pid := state.running[word]["pid"]:
            self.pids[rank] = pid
        return True

    def _send(self, node: str, request: protocol.Request) -> bool:
        """Send a request to a node; False if there is no connection."""
        if node not in self.connections:
            return False
        if self.connections[node].send(request):
            return True
        self.drop(node)
        return False

    def _expect(self, plan: Plan) -> None:
        self.listen(0)  # notice closed connections now, before a new node has the same name
        self.generation = plan.generation
        self.running = {worker.rank: worker.node for worker in plan.workers}
        self.queued, self.pids, self.exit_hints, self.ended = [], {}, {}, []
        self.broken, self.refused = set(), set()

    def _start(self, worker: WorkerPlan) -> None:
        if not self._send(worker.node, self.access.request(worker, self.command)):
            self.lose([worker.rank])

    def _take(self, node: str, report: protocol.Report) -> None:
        """Take note of what a node reports."""
        self.heard(node)
        if isinstance(report, protocol.Status):
            self.statuses[node] = report
        elif isinstance(report, protocol.Cleaned):
            self.cleaned.add(node)
        elif isinstance(report, protocol.Refusal):
            if node not in self.refused:
                self.refused.add(node)
                self.warn(f"{node} refused a request: {protocol.reason(report.error)}")
            for rank in [rank for rank in self.on(node) if rank not in self.pids]:
                self._ended(rank, FAILED_TO_START, time.time(), asked=False)
        elif not isinstance(report, protocol.Started | protocol.Ended) or report.generation != self.generation:
            return  # from an older generation
        elif self.running.get(report.rank) != node:
            return  # its end is known already, or it belongs to another node
        elif isinstance(report, protocol.Started):
            self.pids[report.rank] = report.pid
            queued, self.queued = self.queued, []
            for worker in queued:
                self._start(worker)
        else:
            self.exit_hints[report.rank] = report.hint
            self._ended(report.rank, report.code, report.at, report.asked)

    def _ended(self, rank: int, code: int, at: float, asked: bool = True) -> None:
        if self.running.pop(rank, None) is not None:
            self.ended.append((at, WorkerExit(rank, code, asked)))


def key_of(run: Path) -> bytes:
    """The key of the nodes that mount the folder `run`; raises EngineError if there is no record of it."""
    try:
        key = bytes.fromhex(records.need(run.parent).key)
    except UsageError as error:
        raise EngineError(f"no key to talk to the nodes: {error}", error.hint) from None
    if not key:
        raise EngineError(f"no key to talk to the nodes: {run.parent.name} has ended", "start it again")
    return key
