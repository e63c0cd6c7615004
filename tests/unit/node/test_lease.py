"""Only the relay of a node's own job must renew its lease."""

import hmac
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.ends import KEY
from support.optional import not_none
from support.ports import free_port
from support.repo import ROOT
from support.waiting import eventually

from orchestrate.node import agent, lease
from orchestrate.node.lease import LEASE_TIMEOUT, Lease, answer
from orchestrate.node.loop import Loop


class Now:
    """The node's event loop and clock, controlled by the test."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.due: list[Callable[[], None]] = []
        self.read: Callable[[], None] | None = None
        self.pauses: list[float] = []

    def time(self) -> float:
        return self.now

    def watch(self, sock, read) -> None:
        self.read = read

    def forget(self, sock) -> None:
        self.read = None

    def after(self, seconds: float, callback) -> None:
        self.due.append(callback)
        self.pauses.append(seconds)

    def turn(self) -> None:
        due, self.due = self.due, []
        for callback in due:
            callback()


@pytest.fixture
def held():
    """A lease, the socket of its relay, the clock, and the times at which the lease expired."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as relay:
        relay.bind(("127.0.0.1", 0))
        relay.settimeout(10)
        loop, expired = Now(), []
        node_lease = Lease(cast(Loop, loop), KEY, relay.getsockname(), lambda: expired.append(loop.now))
        yield node_lease, relay, loop, expired
        node_lease.end()


def test_an_answer_to_the_last_request_must_renew_the_lease(held):
    node_lease, relay, loop, expired = held
    loop.now += LEASE_TIMEOUT - 0.1
    question, node = relay.recvfrom(64)
    relay.sendto(answer(KEY, question), node)
    not_none(loop.read)()
    loop.now += LEASE_TIMEOUT - 0.1
    loop.turn()
    assert node_lease.held and not expired


@pytest.mark.parametrize(
    "reply",
    [
        lambda question: b"yes",
        lambda question: b"",
        lambda question: question,
        lambda question: answer(b"another key", question),
        lambda question: answer(KEY, b"an older question"),
    ],
)
def test_any_other_message_must_not_renew_the_lease(held, reply):
    node_lease, relay, loop, expired = held
    loop.now += LEASE_TIMEOUT - 0.1
    question, node = relay.recvfrom(64)
    relay.sendto(reply(question), node)
    not_none(loop.read)()
    loop.now += 0.2
    assert not node_lease.held
    loop.turn()
    assert expired == [loop.now]


def test_each_request_must_be_unique_and_several_must_fit_in_a_lease(held):
    _, relay, loop, _ = held
    for _ in range(3):
        loop.turn()
    assert len({relay.recvfrom(64)[0] for _ in range(4)}) == 4
    assert len(loop.pauses) == 4 and 0 < max(loop.pauses) <= LEASE_TIMEOUT / 4  # so that some may be lost


def answered(relay: socket.socket, loop: Now) -> None:
    """Answer the newest of three requests."""
    for _ in range(3):
        question, node = relay.recvfrom(64)
    relay.sendto(answer(KEY, question), node)
    not_none(loop.read)()
    loop.turn()


def test_an_expired_lease_must_be_renewable(held):
    node_lease, relay, loop, expired = held
    for _ in range(2):
        loop.now += LEASE_TIMEOUT
        assert not node_lease.held
        loop.turn()
    assert len(expired) == 2  # called again while it lasts, to end whatever was started meanwhile
    answered(relay, loop)
    assert node_lease.held and len(expired) == 2


def test_a_released_lease_must_neither_send_requests_nor_expire(held):
    node_lease, relay, loop, expired = held
    relay.recvfrom(64)
    node_lease.end()
    loop.now += 2 * LEASE_TIMEOUT
    loop.turn()
    relay.setblocking(False)
    with pytest.raises(BlockingIOError):
        relay.recvfrom(64)
    assert loop.read is None and not loop.due and not expired
    node_lease.end()


def test_an_unreachable_relay_must_be_retried():
    loop, expired = Now(), []
    # An address that this socket may not send to.
    node_lease = Lease(cast(Loop, loop), KEY, ("255.255.255.255", 9), lambda: expired.append(loop.now))
    try:
        loop.turn()
        assert len(loop.due) == 1 and not expired
    finally:
        node_lease.end()


def test_an_answer_of_a_relay_must_not_reveal_the_key_of_a_connection():
    message = b"link " + b"0" * 64
    assert answer(KEY, message) != hmac.digest(KEY, message, "sha256")


def test_a_node_that_is_cut_off_must_end_new_workers_until_the_relay_answers(held):
    node_lease, relay, loop, expired = held
    loop.now += LEASE_TIMEOUT
    loop.turn()
    loop.now += 1
    loop.turn()
    assert expired == [loop.now - 1, loop.now]
    answered(relay, loop)
    assert node_lease.held and len(expired) == 2


def test_a_lease_must_expire_while_its_relay_is_unreachable():
    loop, expired = Now(), []
    # An address that this socket may not send to.
    node_lease = Lease(cast(Loop, loop), KEY, ("255.255.255.255", 9), lambda: expired.append(loop.now))
    loop.turn()
    loop.now += LEASE_TIMEOUT
    loop.turn()
    assert expired == [loop.now] and len(loop.due) == 1
    node_lease.end()


def test_a_lease_must_be_requested_several_times_before_it_expires():
    assert 4 * lease.RENEW_INTERVAL <= LEASE_TIMEOUT


def test_a_relay_must_sign_its_answers_with_the_key(tmp_path):
    (tmp_path / "key").write_bytes(KEY)
    port = free_port()
    env = os.environ | {"NODE_MODE": "relay", "NODE_PORT": str(port), "NODE_KEY": KEY.hex()}
    relay = subprocess.Popen([sys.executable, str(ROOT / "orchestrate" / "node")], env=env)
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as node:
            node.settimeout(0.05)

            def ask() -> bytes:
                node.sendto(b"a question of 16", ("127.0.0.1", port))
                try:
                    return node.recv(64)
                except OSError:  # it does not listen yet
                    return b""

            assert eventually(ask) == answer(KEY, b"a question of 16")
    finally:
        relay.kill()
        relay.wait()


def test_a_relay_must_survive_a_failed_send_and_ignore_answers(monkeypatch):
    class Enough(Exception):
        pass

    class Wire:
        """A socket that cannot reach the first node."""

        asked, sent = [b"of the first one", answer(KEY, b"of another relay"), b"short", b"of the second on"], []

        def recvfrom(self, size: int) -> tuple[bytes, str]:
            if not self.asked:
                raise Enough
            question = self.asked.pop(0)
            return question, "the first node" if b"first" in question else "the second node"

        def sendto(self, text: bytes, address: str) -> None:
            if address == "the first node":
                raise OSError("no route")
            self.sent.append((text, address))

        def bind(self, address: tuple[str, int]) -> None:
            pass

        def __enter__(self) -> "Wire":
            return self

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(lease.socket, "socket", lambda *_: Wire())
    with pytest.raises(Enough):
        lease.relay(KEY, lease.bound(1))
    assert Wire.sent == [(answer(KEY, b"of the second on"), "the second node")]


def test_a_node_must_use_only_the_last_relay_it_was_given(monkeypatch):
    class Asking:
        made = []

        def __init__(self, loop, key, address, over) -> None:
            self.address, self.ended = address, False
            self.made.append(self)

        def end(self) -> None:
            self.ended = True

    monkeypatch.setattr(agent, "Lease", Asking)
    loop: Any = SimpleNamespace()
    channel: Any = SimpleNamespace()
    node = agent.Agent(loop, KEY)
    for port in (1, 2):
        node.receive(channel, {"ask": "lease", "relay": ["10.0.0.1", port]})
    assert [(one.address, one.ended) for one in Asking.made] == [(("10.0.0.1", 1), True), (("10.0.0.1", 2), False)]
