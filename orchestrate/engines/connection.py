"""Connections to nodes, and what an engine does over them: start and stop workers, and learn of their ends.

`node/wait.py` describes the messages.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from orchestrate.engines import messages
from orchestrate.errors import EngineError, EngineLost, UsageError
from orchestrate.files import records
from orchestrate.job.outcomes import LOST, TERMINATED, Doing, WorkerExit
from orchestrate.job.plan import Plan, WorkerPlan
from orchestrate.node.loop import LONGEST_GREETING
from orchestrate.node.sealed import Seal
from orchestrate.node.worker import FAILED_TO_START

ANSWERS = 10.0  # seconds that a node may take to answer
DYING = 5.0  # seconds that a node takes to die, at most
LOOKS = 1.0  # seconds that it may take to report its workers while the job goes on; a paused node does not


class Link:
    """A connection to a node: JSON lines in both directions, each with an HMAC."""

    def __init__(self, sock: socket.socket, key: bytes, decode: Callable[[bytes], bytes] = bytes) -> None:
        """`key` is that of the job; `decode` removes the frames in which an engine sends data."""
        self.sock, self.decode, self.partial = sock, decode, b""
        self.seal = Seal(key, listens=False)
        sock.settimeout(ANSWERS)

    def greet(self, patience: float) -> bool:
        """Exchange nonces and proofs of the key; False if the node does not answer within `patience` seconds."""
        deadline = time.monotonic() + patience
        try:
            self.seal.meet(self._greeting(deadline))
            self.sock.settimeout(ANSWERS)
            self.sock.sendall(self.seal.word + b"\n" + self.seal.close(b"") + b"\n")
            if self.seal.open(self._greeting(deadline)):
                raise ValueError("no proof")
            self.sock.settimeout(ANSWERS)
        except (OSError, ValueError):
            self.close()
            return False
        return True

    def _greeting(self, deadline: float) -> bytes:
        """The next line, which must be short and arrive in time; raises OSError."""
        while b"\n" not in self.partial:
            self.sock.settimeout(max(0.001, deadline - time.monotonic()))
            if len(self.partial) > LONGEST_GREETING or not (chunk := self.sock.recv(1 << 16)):
                raise OSError("no such line, or the connection has ended")
            self.partial += self.decode(chunk)
        line, _, self.partial = self.partial.partition(b"\n")
        return line

    def send(self, ask: str, **facts: Any) -> bool:
        """Send a request to the node; False if the connection has ended."""
        text = json.dumps({"ask": ask, **facts}).encode()
        try:
            self.sock.sendall(self.seal.close(text) + b"\n")
        except OSError:
            return False
        return True

    def receive(self) -> list[dict[str, Any]] | None:
        """The messages of the node, once the socket is readable; None at the end of the connection."""
        chunk = b""
        with contextlib.suppress(OSError):
            chunk = self.sock.recv(1 << 16)
        if not chunk:
            return None
        *lines, self.partial = (self.partial + self.decode(chunk)).split(b"\n")
        if len(self.partial) > messages.LONGEST:
            return None
        try:
            return [messages.read(self.seal.open(line)) for line in lines]
        except ValueError:  # for example Docker's error text, if a container ends while an exec starts
            return None

    def interrupt(self) -> None:
        """End the connection, also for a thread that waits for an answer; it must still be closed."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection, even if another process holds its socket."""
        self.interrupt()
        self.sock.close()

    def converse(self, ask: str, patience: float = ANSWERS, **facts: Any) -> dict[str, Any]:
        """Send a request, and wait for the answer; for a connection that is used for nothing else.

        Raises ConnectionError if the connection ends or the answer takes more than `patience` seconds, whatever else
        the node sends meanwhile; EngineError with an error of the node.
        """
        deadline = time.monotonic() + patience
        self.sock.settimeout(patience)
        sent = self.send(ask, **facts)
        while sent and (left := deadline - time.monotonic()) > 0:
            self.sock.settimeout(left)
            heard = self.receive()
            if heard is None:
                break
            for message in heard:
                if message["say"] == "refused" or (message["say"] == ask and "error" in message):
                    raise EngineError(f"a node says: {messages.reason(message)}")
                if message["say"] == ask:
                    return message
        raise ConnectionError("the node has not answered in time, or the connection has ended")


class Linked:
    """The part of an engine that is the same for all engines."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.key = b""  # of the job, or of its cluster
        self.links: dict[str, Link] = {}  # by node
        self.generation = -1
        self.running: dict[int, str] = {}  # rank: node, of workers that have not ended
        self.queued: list[WorkerPlan] = []  # workers that start as soon as rank 0 has started
        self.command: tuple[str, ...] = ()
        self.pids: dict[int, int] = {}  # by rank, as the node sees them
        self.signs: dict[int, str] = {}  # by rank, the sign in the report of its end, such as oom or ending
        self.ended: list[tuple[float, WorkerExit]] = []  # in seconds since 1970; not yet reported
        self.broken: set[str] = set()  # nodes whose connection has ended
        self.statuses: dict[str, dict[str, Any]] = {}  # by node, its last status
        self.cleaned: set[str] = set()  # nodes that have reported that they are cleaned
        self.refusals: list[str] = []  # refused requests, with the reason; not yet reported
        self.refused: set[str] = set()  # nodes of which a refusal is known; code of an image could repeat it for ever

    def _connect(self, node: str) -> Link | None:
        """Connect to a node; None if it does not run; raises EngineLost. Must be thread-safe."""
        raise NotImplementedError

    def _exists(self, node: str) -> bool:
        """Whether a node that does not answer may recover."""
        raise NotImplementedError

    def _runs(self, node: str) -> bool:
        """Ask the engine whether a node whose connection has ended still runs; raises EngineLost."""
        return False

    def _lost(self, nodes: set[str]) -> None:
        """Handle the end of connections: the nodes have ended, even if they are still listed, or the connections alone.

        All at once: a node that takes connections and says nothing takes as long as it may.
        """
        deadline = time.monotonic() + DYING
        while nodes:
            alive = {node for node in nodes if time.monotonic() < deadline and self._runs(node)}
            self._end(rank for node in nodes - alive for rank in self._on(node))
            self._link(alive)
            states = dict(self._ask(alive))
            for node, state in states.items():
                self._end([rank for rank in self._on(node) if not self._know(rank, state)])
            nodes = alive - states.keys()
            if nodes:
                time.sleep(0.02)

    def _on(self, node: str) -> list[int]:
        """The ranks on a node that have not ended."""
        return [rank for rank, where in self.running.items() if where == node]

    # --- what the supervisor asks for

    def host(self, node: str) -> str:
        """Empty: all nodes are on this machine."""
        return ""

    def warnings(self) -> list[str]:
        """Requests that nodes have refused."""
        found, self.refusals = self.refusals, []
        return found

    def gather(self, stopped: Callable[[], bool]) -> None:
        """Do nothing: nodes write to the job's folder itself."""

    def start(self, workers: tuple[WorkerPlan, ...], command: tuple[str, ...]) -> None:
        """Start the workers on their nodes, the others as soon as rank 0 has started.

        Rank 0 opens torch's store; a worker that cannot connect to it waits half a second before it tries again.
        """
        self._expect(workers)
        self._link(dict.fromkeys(worker.node for worker in workers))
        self.command, self.queued = command, list(workers[1:])
        self._start(workers[0])

    def adopt_workers(self, plan: Plan) -> set[int]:
        """Take over the workers of a plan that run already; return the ranks that their nodes do not know."""
        self._expect(plan.workers)
        nodes = list(dict.fromkeys(worker.node for worker in plan.workers))
        self._link(nodes)
        states = self._ask(nodes)
        strangers = set()
        for worker in plan.workers:
            state = states.get(worker.node)
            if state is not None:
                if not self._know(worker.rank, state):
                    strangers.add(worker.rank)
            elif self._exists(worker.node):
                raise EngineLost(f"{worker.node} does not answer")
            else:
                self._end([worker.rank])
        return strangers

    def starting(self) -> set[int]:
        """The ranks of the workers that have not started yet."""
        return self.running.keys() - self.pids.keys()

    def wait(self, timeout: float) -> list[WorkerExit]:
        """The workers that have ended since the last call, in the order of their ends."""
        self._listen(0 if self.ended else timeout)
        broken, self.broken = self.broken, set()
        self._lost(broken)
        ended, self.ended = sorted(self.ended, key=lambda one: one[0]), []
        return [exit for _, exit in ended]

    def doing(self) -> dict[int, Doing]:
        """What the running workers are doing, as far as their nodes say."""
        states, found = self._ask(set(self.running.values()), LOOKS), {}
        for rank, node in self.running.items():
            doing = states[node]["running"].get(str(rank)) if node in states else None
            if doing and doing["state"]:  # only if there is /proc
                found[rank] = Doing(doing["state"], doing["cpu"])
        return found

    def stop(self, kill: bool) -> None:
        """Ask all workers to stop, or kill them."""
        for worker in self.queued:
            self._ended(worker.rank, TERMINATED, time.time())
        self.queued = []
        self._tell("stop", kill=kill)

    def warmed(self, nodes: Iterable[str], patience: float) -> bool:
        """Wait until nodes have imported what workers will need; False if some have not within `patience` seconds."""
        self._link(nodes := list(nodes))
        deadline = time.monotonic() + patience
        while True:
            states = self._ask(nodes, LOOKS)
            if len(states) == len(nodes) and not any(state["importing"] for state in states.values()):
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)

    def dump(self) -> None:
        """Make all workers print their stacks, and abort."""
        self._tell("freeze")
        self._ask(set(self.running.values()), LOOKS)  # else one that ends would let others leave where they stand
        self._tell("dump")

    def discard(self, nodes: Iterable[str]) -> None:
        """Remove nodes by force."""
        raise NotImplementedError

    # --- for engines

    def _take_key(self, run: Path) -> None:
        """Read the key of the nodes that mount the folder `run`; raises EngineError."""
        try:
            self.key = bytes.fromhex(records.need(run.parent).key)
        except UsageError as error:
            raise EngineError(f"no key to talk to the nodes: {error}", error.hint) from None
        if not self.key:
            raise EngineError(f"no key to talk to the nodes: {run.parent.name} has ended", "start it again")

    def _request(self, worker: WorkerPlan) -> dict[str, Any]:
        """Environment and working directory of a worker, as fields of its request."""
        return {"env": worker.env, "inherit": True, "cwd": None}

    def _clean(self, nodes: Iterable[str]) -> None:
        """Clean up nodes for another job, and wait for that; discard those that do not confirm it."""
        nodes, self.cleaned = set(nodes), set()
        self._link(nodes)
        self._tell("clean")
        deadline = time.monotonic() + ANSWERS
        while (nodes & self.links.keys()) - self.cleaned and time.monotonic() < deadline:
            self._listen(0.1)
        if nodes - self.cleaned:  # processes of the job may still run there
            self.discard(nodes - self.cleaned)

    def _break(self, node: str) -> None:
        """Close the connection to a node; `wait` finds out whether the node has ended."""
        link = self.links.pop(node)
        self.selector.unregister(link.sock)
        link.close()
        self.broken.add(node)

    def _ask(self, nodes: Iterable[str], patience: float = ANSWERS) -> dict[str, dict[str, Any]]:
        """The status of the nodes that answer."""
        self.statuses = {}
        asked = {node for node in nodes if self._send(node, "status")}
        deadline = time.monotonic() + patience
        while (asked & self.links.keys()) - self.statuses.keys() and time.monotonic() < deadline:
            self._listen(0.1)
        return self.statuses

    def _know(self, rank: int, state: dict[str, Any]) -> bool:
        """Take over a node's status of a worker; False if the node does not know it."""
        word = str(rank)
        if state["generation"] != self.generation or word not in state["codes"] | state["running"]:
            return False
        if word in state["codes"]:
            self.signs[rank] = state["signs"].get(word, "")
            self._ended(rank, state["codes"][word], time.time())
        elif pid := state["running"][word]["pid"]:
            self.pids[rank] = pid
        return True

    def _end(self, ranks: Iterable[int]) -> None:
        """Report workers as lost with their node."""
        for rank in list(ranks):
            self._ended(rank, LOST, time.time())

    def _send(self, node: str, ask: str, **facts: Any) -> bool:
        """Send a request to a node; False if there is no connection."""
        if node not in self.links:
            return False
        if self.links[node].send(ask, **facts):
            return True
        self._break(node)
        return False

    def _expect(self, workers: tuple[WorkerPlan, ...]) -> None:
        self._listen(0)  # notice closed connections now, before a new node has the same name
        self.generation = int(workers[0].env["TORCHELASTIC_RESTART_COUNT"])
        self.running = {worker.rank: worker.node for worker in workers}
        self.queued, self.pids, self.signs, self.ended = [], {}, {}, []
        self.broken, self.refused = set(), set()

    def _start(self, worker: WorkerPlan) -> None:
        if not self._send(worker.node, "start", command=self.command, **self._request(worker)):
            self._end([worker.rank])

    def _link(self, nodes: Iterable[str]) -> None:
        """Connect in parallel to the nodes that run and have no connection yet."""
        lacking = [node for node in nodes if node not in self.links]
        if not lacking:
            return
        with ThreadPoolExecutor(16) as pool:
            links = list(pool.map(self._connect, lacking))
        for node, link in zip(lacking, links):
            if link:
                self.links[node] = link
                self.selector.register(link.sock, selectors.EVENT_READ, node)

    def _tell(self, ask: str, **facts: Any) -> None:
        for node in list(self.links):
            self._send(node, ask, **facts)

    def _listen(self, timeout: float) -> None:
        """Receive messages of nodes; returns after the first ones."""
        for key, _ in self.selector.select(timeout):
            said = self.links[key.data].receive() if key.data in self.links else []
            if said is None:
                self._break(key.data)
            for message in said or ():
                self._heard(key.data, message)

    def _heard(self, node: str, message: dict[str, Any]) -> None:
        say = message["say"]
        if say == "status":
            self.statuses[node] = message
        elif say == "clean":
            self.cleaned.add(node)
        elif say == "refused":
            if node not in self.refused:
                self.refused.add(node)
                self.refusals.append(f"{node} refused a request: {messages.reason(message)}")
            for rank in [rank for rank in self._on(node) if rank not in self.pids]:
                self._ended(rank, FAILED_TO_START, time.time(), asked=False)
        elif say not in ("started", "ended") or message["generation"] != self.generation:
            return  # from an older generation
        elif self.running.get(message["rank"]) != node:
            return  # its end is known already, or it belongs to another node
        elif say == "started":
            self.pids[message["rank"]] = message["pid"]
            queued, self.queued = self.queued, []
            for worker in queued:
                self._start(worker)
        else:
            self.signs[message["rank"]] = message["sign"]
            self._ended(message["rank"], message["code"], message["at"], message["asked"])

    def _ended(self, rank: int, code: int, at: float, asked: bool = True) -> None:
        if self.running.pop(rank, None) is not None:
            self.ended.append((at, WorkerExit(rank, code, asked)))
