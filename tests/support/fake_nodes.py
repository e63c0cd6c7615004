"""Fake nodes: the test controls the far ends of an engine's connections."""

import socket

from orchestrate.clock import SYSTEM
from orchestrate.engines.connection import NodeConnection
from orchestrate.engines.node_clients import NodeClients
from orchestrate.node.messages import protocol
from orchestrate.plan.plan import Plan, WorkerPlan
from orchestrate.spec.spec import JobSpec
from support.ends import KEY, End, greeted
from support.messages import encoded


class Node:
    """The far end of a connection to a node; its messages wait until a client is connected."""

    def __init__(self) -> None:
        self.here, self.there = socket.socketpair()
        self.end_, self.waits = End(self.here, listens=True), []

    def say(self, say: str, **facts: object) -> None:
        self.waits.append(encoded(say, **facts))
        self.speak()

    def speak(self) -> None:
        """Send the waiting messages once a client is connected."""
        while self.end_.signer.ready and self.waits:
            self.end_.send(self.waits.pop(0))

    def ended(self, rank: int, code: int, **facts: object) -> None:
        self.say("ended", rank=rank, code=code, **facts)

    def knows(self, generation: int = 0, **facts: object) -> None:
        self.say("status", generation=generation, **facts)

    def asked(self) -> list[dict]:
        """The requests that have arrived so far."""
        return self.end_.heard() if self.end_.signer.ready else []

    def end(self) -> None:
        self.here.close()


class Reached:
    """Connects an engine to the fake nodes."""

    spec, clock, secrets = JobSpec(), SYSTEM, "/run/secrets"

    def __init__(self, nodes: "Nodes") -> None:
        self.nodes = nodes

    def connect(self, node: str) -> NodeConnection | None:
        if node not in self.nodes.up:
            return None
        fake = self.nodes.fakes[node]
        connection = NodeConnection(fake.there, KEY)
        greeted(connection, fake.end_)
        fake.speak()
        return connection

    def may_recover(self, node: str) -> bool:
        return node in self.nodes.there

    def runs(self, node: str) -> bool:
        return node in self.nodes.look and not self.nodes.look.remove(node)

    def request(self, worker: WorkerPlan, command: tuple[str, ...]) -> protocol.Start:
        return protocol.Start([*command], worker.env, inherit=True)


class Nodes(NodeClients):
    """Connections to fake nodes; `again` replaces a node that has ended."""

    def __init__(self, count: int) -> None:
        self.warned: list[str] = []
        super().__init__(Reached(self), self.warned.append)
        self.fakes = {f"node-{rank}": Node() for rank in range(count)}
        self.up = set(self.fakes)  # nodes that accept connections
        self.look: list[str] = []  # nodes whose container is reported as running, once per entry
        self.there: set[str] = set()  # nodes that may recover

    def again(self, name: str) -> Node:
        self.fakes[name].end()
        self.fakes[name] = Node()
        return self.fakes[name]

    def warnings(self) -> list[str]:
        """The warnings since the last call."""
        found = [*self.warned]
        self.warned.clear()
        return found

    def close(self) -> None:
        self.selector.close()
        for connection in self.connections.values():
            connection.close()
        for node in self.fakes.values():
            node.there.close()
            node.end()


def planned(count: int = 3, generation: int = 0, command: tuple[str, ...] = ("x.py",), per_node: int = 1) -> Plan:
    """A plan with as many workers on each node."""
    env = {"TORCHELASTIC_RESTART_COUNT": str(generation)}
    workers = tuple(
        WorkerPlan(
            rank=rank, local_rank=0, node=f"node-{rank // per_node}", gpu="", cores=(), env={"RANK": str(rank), **env}
        )
        for rank in range(count)
    )
    plan = object.__new__(Plan)
    for name, value in (("workers", workers), ("generation", generation), ("command", command)):
        object.__setattr__(plan, name, value)
    return plan


def asks(node: Node) -> list[str]:
    return [request["ask"] for request in node.asked()]
