"""A job on a fake Swarm: its session, three idle nodes, and connections whose far ends the test controls."""

import contextlib
import os
import selectors
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

from orchestrate.engines.swarm.engine import SwarmEngine
from orchestrate.engines.swarm.session import SwarmSession
from orchestrate.host import records
from orchestrate.plan.plan import Plan
from orchestrate.spec.spec import JobSpec
from support import ends
from support.manager_stub import StubManager
from support.plans import HERE, plan
from support.scripted import Clock

SPEC = JobSpec(trainers=2, user=str(os.getuid()))  # the owner of the test's folder


class FakeSession(SwarmSession):
    """A session with attributes for tests."""

    warned: list[str]  # its warnings
    ends: dict[str, ends.End]  # far ends of connections, by node


@contextlib.contextmanager
def three_nodes(clock: Clock, run: Path) -> Iterator[FakeSession]:
    """A job with three healthy nodes: t0 and t1 are the trainers, t2 is the master."""
    records.make(run.parent, ends.KEY)
    warned: list[str] = []
    engine = SwarmEngine()
    engine.manager.clock = clock
    session = cast(FakeSession, engine.open(SPEC, job(), run, warned.append))
    session.swarm.prepare()
    session.warned = warned
    session.have_code = {"t0", "t1", "t2"}
    session._send_code = lambda code, nodes, stopped=None: session.have_code.update(
        session.nodes[name]["ID"] for name in nodes
    )
    for role, count in (("trainer", 2), ("master", 1)):
        session.swarm.scale(role, count)
    session.nodes = session.swarm.look()
    session.ends = {}
    listen = session.clients.listen

    def listen_briefly(timeout: float) -> None:
        clock.sleep(timeout)
        listen(min(timeout, 0.01))

    session.clients.listen = listen_briefly
    yield session
    for link in session.clients.connections.values():
        link.close()
    for end in session.ends.values():
        end.sock.close()
    session.pool.shutdown()


def job(spec: JobSpec = SPEC, **site: str) -> Plan:
    return plan(spec, HERE.but(**site), "j")


def connected(engine: FakeSession, *nodes: str) -> None:
    """Create connections to nodes, with their far ends in `ends`."""
    for rank, node in enumerate(("master", "trainer-1", "trainer-2")):
        engine.clients.running[rank] = node
        if node in nodes:
            engine.clients.connections[node], engine.ends[node] = ends.connected()
            engine.linked[node] = engine._task_id(node)
            engine.clients.selector.register(engine.clients.connections[node].sock, selectors.EVENT_READ, node)


def state(stub: StubManager, node: str, value: str) -> None:
    stub.task(node)["Status"]["State"] = value


def down(stub: StubManager, number: int, now: str = "down") -> None:
    stub.hosts[number - 1]["Status"]["State"] = now


def sync(**answers: object) -> SimpleNamespace:
    """A fake file sync, without any node."""
    fake = SimpleNamespace(calls=[])
    for name in ("catch_up", "copy_all", "lacks_space", "silent", "warnings", "give_up", "failed", "close"):
        answer = answers.get(name)

        def call(*_: object, name: str = name, answer: object = answer) -> object:
            fake.calls.append(name)
            if isinstance(answer, Exception):
                raise answer
            return answer if answer is not None else set()

        setattr(fake, name, call)
    return fake
