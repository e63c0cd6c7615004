"""Connections to nodes, and what an engine does over them: start workers, stop them, hear of their ends.

What is said over them stands in `node/wait.py`.
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

from orchestrate import records
from orchestrate.engines import LOST, TERMINATED, Doing, Exit, messages
from orchestrate.errors import EngineError, EngineLost, UsageError
from orchestrate.node.loop import LONGEST_GREETING
from orchestrate.node.sealed import Seal
from orchestrate.node.worker import FAILED_TO_START
from orchestrate.plan import Plan, WorkerPlan

ANSWERS = 10.0  # seconds that a node may take to answer
DYING = 5.0  # seconds that a node takes to die, at most
LOOKS = 1.0  # seconds that it may take to say what its workers are doing, while the job goes on; a paused one does not


class Link:
    """A connection to a node: JSON lines, both ways, which others can reach, too, but not speak on."""

    def __init__(self, sock: socket.socket, key: bytes, decode: Callable[[bytes], bytes] = bytes) -> None:
        """`key` is that of the job; `decode` takes what was received out of what an engine wraps around it."""
        self.sock, self.decode, self.partial = sock, decode, b""
        self.seal = Seal(key, listens=False)
        sock.settimeout(ANSWERS)

    def greet(self, patience: float) -> bool:
        """Exchange the words that a connection begins with; False where the node does not, in some seconds."""
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
        """The next line, which must be short and come in time; raises OSError."""
        while b"\n" not in self.partial:
            self.sock.settimeout(max(0.001, deadline - time.monotonic()))
            if len(self.partial) > LONGEST_GREETING or not (chunk := self.sock.recv(1 << 16)):
                raise OSError("no such line, or the connection has ended")
            self.partial += self.decode(chunk)
        line, _, self.partial = self.partial.partition(b"\n")
        return line

    def send(self, ask: str, **facts: Any) -> bool:
        """Ask the node for something; False where the connection has ended."""
        text = json.dumps({"ask": ask, **facts}).encode()
        try:
            self.sock.sendall(self.seal.close(text) + b"\n")
        except OSError:
            return False
        return True

    def receive(self) -> list[dict[str, Any]] | None:
        """What the node says, once the socket can be read; None at the end of the connection."""
        try:
            chunk = self.sock.recv(1 << 16)
        except OSError:
            chunk = b""
        if not chunk:
            return None
        *lines, self.partial = (self.partial + self.decode(chunk)).split(b"\n")
        if len(self.partial) > messages.LONGEST:
            return None
        try:
            return [messages.read(self.seal.open(line)) for line in lines]
        except ValueError:  # what Docker says where a container ends while something starts in it, say
            return None

    def close(self) -> None:
        """End the connection, whoever else holds its socket."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()

    def converse(self, ask: str, patience: float = ANSWERS, **facts: Any) -> dict[str, Any]:
        """Ask, and wait for the answer; for a connection that serves nothing else.

        Raises ConnectionError where the connection ends, or is silent for `patience` seconds, EngineError for what the
        node has to say.
        """
        self.sock.settimeout(patience)
        sent = self.send(ask, **facts)
        while sent:
            heard = self.receive()
            if heard is None:
                break
            for message in heard:
                if message["say"] == "refused" or (message["say"] == ask and "error" in message):
                    raise EngineError(f"a node says: {_reason(message)}")
                if message["say"] == ask:
                    return message
        raise ConnectionError("the connection has ended")


def _reason(message: dict[str, Any]) -> str:
    """Why a node has not done something, as it says; no more than a person reads."""
    return " ".join(message["error"].split())[:200]


class Linked:
    """The half of an engine that is the same wherever nodes live."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.key = b""  # of the job, or of its cluster
        self.links: dict[str, Link] = {}  # by node
        self.generation = -1
        self.running: dict[int, str] = {}  # rank: its node, of workers whose end is not known
        self.queued: list[WorkerPlan] = []  # workers that start as soon as rank 0 has
        self.command: tuple[str, ...] = ()
        self.pids: dict[int, int] = {}  # by rank, as the node sees them
        self.signs: dict[int, str] = {}  # by rank, what its node has noticed at its end: oom, ending
        self.ended: list[tuple[float, Exit]] = []  # in seconds since 1970; not yet reported
        self.broken: set[str] = set()  # nodes whose connection has ended
        self.statuses: dict[str, dict[str, Any]] = {}  # by node, what it has answered
        self.cleaned: set[str] = set()  # nodes that have said that they are ready for another job
        self.refusals: list[str] = []  # what nodes have not done, and why; not yet reported
        self.refused: set[str] = set()  # nodes of which one refusal is known: code of an image could say it for ever

    def _connect(self, node: str) -> Link | None:
        """A connection to a node, or None where it does not run; raises EngineLost. May be called by a thread."""
        raise NotImplementedError

    def _exists(self, node: str) -> bool:
        """Whether a node that does not answer may still come to itself."""
        raise NotImplementedError

    def _runs(self, node: str) -> bool:
        """Whether a node whose connection has ended runs all the same, by a fresh look; raises EngineLost."""
        return False

    def _lost(self, node: str) -> None:
        """A connection has ended: so has the node, though it may still look well; or only the connection has."""
        deadline = time.monotonic() + DYING
        while time.monotonic() < deadline and self._runs(node):
            self._link([node])
            state = self._ask([node]).get(node)
            if state:
                its = [rank for rank, where in self.running.items() if where == node]
                return self._end(rank for rank in its if not self._know(rank, state))
            time.sleep(0.02)
        self._end(rank for rank, where in self.running.items() if where == node)

    # --- what the supervisor asks for

    def host(self, node: str) -> str:
        """No name: all nodes are on this machine."""
        return ""

    def warnings(self) -> list[str]:
        """What nodes have refused."""
        found, self.refusals = self.refusals, []
        return found

    def gather(self, stopped: Callable[[], bool]) -> None:
        """Nothing: nodes write in the job's folder itself."""

    def start(self, workers: tuple[WorkerPlan, ...], command: tuple[str, ...]) -> None:
        """Have each worker's node start it, the others' as soon as rank 0 is there.

        Whoever does not find torch's store listening, which rank 0 opens, looks again only after half a second.
        """
        self._expect(workers)
        self._link(dict.fromkeys(worker.node for worker in workers))
        self.command, self.queued = command, list(workers[1:])
        self._start(workers[0])

    def adopt_workers(self, plan: Plan) -> set[int]:
        """Take up the workers of a plan that were started earlier; return the ranks that living nodes do not know."""
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

    def wait(self, timeout: float) -> list[Exit]:
        """The workers that have ended since the last call, in the order of their ends."""
        self._listen(0 if self.ended else timeout)
        while self.broken:
            self._lost(self.broken.pop())
        ended, self.ended = sorted(self.ended, key=lambda one: one[0]), []
        return [exit for _, exit in ended]

    def doing(self) -> dict[int, Doing]:
        """What the running workers are doing, as far as their nodes say."""
        states, found = self._ask(set(self.running.values()), LOOKS), {}
        for rank, node in self.running.items():
            doing = states[node]["running"].get(str(rank)) if node in states else None
            if doing and doing["state"]:  # where there is /proc
                found[rank] = Doing(doing["state"], doing["cpu"])
        return found

    def stop(self, kill: bool) -> None:
        """Ask all workers to stop, or kill them."""
        for worker in self.queued:
            self._ended(worker.rank, TERMINATED, time.time())
        self.queued = []
        self._tell("stop", kill=kill)

    def dump(self) -> None:
        """Have all workers print where they stand, and abort."""
        self._tell("dump")

    def discard(self, nodes: Iterable[str]) -> None:
        """Remove nodes by force."""
        raise NotImplementedError

    # --- for engines

    def _take_key(self, run: Path) -> None:
        """Have the key of the nodes that see the folder `run`; raises EngineError."""
        try:
            self.key = bytes.fromhex(records.need(run.parent).key)
        except UsageError as error:
            raise EngineError(f"no key to talk to the nodes: {error}", error.hint) from None
        if not self.key:
            raise EngineError(f"no key to talk to the nodes: {run.parent.name} has ended", "start it again")

    def _request(self, worker: WorkerPlan) -> dict[str, Any]:
        """Environment and folder of a worker."""
        return {"env": worker.env, "inherit": True, "cwd": None}

    def _clean(self, nodes: Iterable[str]) -> None:
        """Have nodes make themselves ready for another job, and wait until they are; discard those that are not."""
        nodes, self.cleaned = set(nodes), set()
        self._link(nodes)
        self._tell("clean")
        deadline = time.monotonic() + ANSWERS
        while (nodes & self.links.keys()) - self.cleaned and time.monotonic() < deadline:
            self._listen(0.1)
        if nodes - self.cleaned:  # what the job has started may still be there
            self.discard(nodes - self.cleaned)

    def _break(self, node: str) -> None:
        """The connection to a node has ended; what that means is found out in `wait`."""
        link = self.links.pop(node)
        self.selector.unregister(link.sock)
        link.close()
        self.broken.add(node)

    def _ask(self, nodes: Iterable[str], patience: float = ANSWERS) -> dict[str, dict[str, Any]]:
        """What nodes know of their workers, as far as they answer."""
        self.statuses = {}
        asked = {node for node in nodes if self._send(node, "status")}
        deadline = time.monotonic() + patience
        while (asked & self.links.keys()) - self.statuses.keys() and time.monotonic() < deadline:
            self._listen(0.1)
        return self.statuses

    def _know(self, rank: int, state: dict[str, Any]) -> bool:
        """Take up what a node knows of a worker, if it knows it."""
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
        """Workers are lost with their node."""
        for rank in list(ranks):
            self._ended(rank, LOST, time.time())

    def _send(self, node: str, ask: str, **facts: Any) -> bool:
        """Ask a node for something; False where there is no connection any more."""
        if node not in self.links:
            return False
        if self.links[node].send(ask, **facts):
            return True
        self._break(node)
        return False

    def _expect(self, workers: tuple[WorkerPlan, ...]) -> None:
        self._listen(0)  # a connection that has ended must not be taken for that of a node that is new
        self.generation = int(workers[0].env["TORCHELASTIC_RESTART_COUNT"])
        self.running = {worker.rank: worker.node for worker in workers}
        self.queued, self.pids, self.signs, self.ended = [], {}, {}, []
        self.broken, self.refused = set(), set()

    def _start(self, worker: WorkerPlan) -> None:
        if not self._send(worker.node, "start", command=self.command, **self._request(worker)):
            self._end([worker.rank])

    def _link(self, nodes: Iterable[str]) -> None:
        """Have connections to nodes, made all at once; none to those that do not run."""
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
        """Take in what nodes say, as soon as one does."""
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
                self.refusals.append(f"{node} refused a request: {_reason(message)}")
            for rank in [rank for rank, where in self.running.items() if where == node and rank not in self.pids]:
                self._ended(rank, FAILED_TO_START, time.time(), asked=False)
        elif say not in ("started", "ended") or message["generation"] != self.generation:
            return  # what an older one still had to say
        elif self.running.get(message["rank"]) != node:
            return  # we know already how it ended; or it is another node's
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
            self.ended.append((at, Exit(rank, code, asked)))
