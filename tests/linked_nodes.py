"""An engine whose nodes are played: the far ends of its connections are the test's."""

import socket

from ends import KEY, End, greeted
from said import sent

from orchestrate.engines.connection import Link, Linked
from orchestrate.job.plan import Plan, WorkerPlan


class Node:
    """The far end of connections to a node; messages wait until a client is connected."""

    def __init__(self) -> None:
        self.here, self.there = socket.socketpair()
        self.end_, self.waits = End(self.here, listens=True), []

    def say(self, say: str, **facts: object) -> None:
        self.waits.append(sent(say, **facts))
        self.speak()

    def speak(self) -> None:
        """Send the waiting messages once a client is connected."""
        while self.end_.seal.met and self.waits:
            self.end_.send(self.waits.pop(0))

    def ended(self, rank: int, code: int, **facts: object) -> None:
        self.say("ended", rank=rank, code=code, **facts)

    def knows(self, generation: int = 0, **facts: object) -> None:
        self.say("status", generation=generation, **facts)

    def asked(self) -> list[dict]:
        """What it has been asked until now."""
        return self.end_.heard() if self.end_.seal.met else []

    def end(self) -> None:
        self.here.close()


class Nodes(Linked):
    """An engine whose nodes are played; a node that ends is made anew by `again`."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.played = {f"node-{rank}": Node() for rank in range(count)}
        self.up = set(self.played)  # those that can be connected to
        self.look: list[str] = []  # whose container is found to run, once for each
        self.there: set[str] = set()  # those that may come to themselves

    def again(self, name: str) -> Node:
        self.played[name].end()
        self.played[name] = Node()
        return self.played[name]

    def _connect(self, node: str) -> Link | None:
        if node not in self.up:
            return None
        played = self.played[node]
        link = Link(played.there, KEY)
        greeted(link, played.end_)
        played.speak()
        return link

    def _exists(self, node: str) -> bool:
        return node in self.there

    def _runs(self, node: str) -> bool:
        return node in self.look and not self.look.remove(node)

    def close(self) -> None:
        self.selector.close()
        for link in self.links.values():
            link.close()
        for node in self.played.values():
            node.there.close()
            node.end()


def workers(count: int = 3, generation: int = 0) -> tuple[WorkerPlan, ...]:
    """One on each node."""
    return tuple(
        WorkerPlan(
            rank=rank,
            node=f"node-{rank}",
            gpu="",
            cores=(),
            env={"RANK": str(rank), "TORCHELASTIC_RESTART_COUNT": str(generation)},
        )
        for rank in range(count)
    )


def planned(count: int = 3, generation: int = 0) -> Plan:
    made = object.__new__(Plan)
    object.__setattr__(made, "workers", workers(count, generation))
    return made


def asks(node: Node) -> list[str]:
    return [request["ask"] for request in node.asked()]
