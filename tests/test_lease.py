"""A node's lease must be renewed by the relay of its own job alone."""

import hmac
import os
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest
from conftest import ROOT, eventually
from support.ends import KEY

from orchestrate.engines.ports import free_port
from orchestrate.node import agent as wait
from orchestrate.node import lease
from orchestrate.node.lease import LEASE_TIMEOUT, Lease, answer


class Now:
    """The node's loop and its clock, whose time and turns are the test's."""

    def __init__(self) -> None:
        self.now, self.due, self.read = 1000.0, [], None
        self.pauses = []

    def monotonic(self) -> float:
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
def held(monkeypatch):
    """A lease, the socket of its relay, the clock, and the times at which it has run out."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as relay:
        relay.bind(("127.0.0.1", 0))
        relay.settimeout(10)
        loop, over = Now(), []
        monkeypatch.setattr(lease, "time", loop)
        made = Lease(loop, KEY, relay.getsockname(), lambda: over.append(loop.now))
        yield made, relay, loop, over
        made.end()


def test_an_answer_to_the_last_question_must_renew_it(held):
    made, relay, loop, over = held
    loop.now += LEASE_TIMEOUT - 0.1
    question, node = relay.recvfrom(64)
    relay.sendto(answer(KEY, question), node)
    loop.read()
    loop.now += LEASE_TIMEOUT - 0.1
    loop.turn()
    assert made.held and not over


@pytest.mark.parametrize(
    "words",
    [
        lambda question: b"yes",
        lambda question: b"",
        lambda question: question,
        lambda question: answer(b"another key", question),
        lambda question: answer(KEY, b"an older question"),
    ],
)
def test_the_words_of_anyone_else_must_not_renew_it(held, words):
    made, relay, loop, over = held
    loop.now += LEASE_TIMEOUT - 0.1
    question, node = relay.recvfrom(64)
    relay.sendto(words(question), node)
    loop.read()
    loop.now += 0.2
    assert not made.held
    loop.turn()
    assert over == [loop.now]


def test_each_question_must_be_a_new_one_and_several_asked_in_a_lease(held):
    _, relay, loop, _ = held
    for _ in range(3):
        loop.turn()
    assert len({relay.recvfrom(64)[0] for _ in range(4)}) == 4
    assert len(loop.pauses) == 4 and 0 < max(loop.pauses) <= LEASE_TIMEOUT / 4  # so that some may be lost on their way


def answered(relay: socket.socket, loop: Now) -> None:
    """Have the newest of three questions answered."""
    for _ in range(3):
        question, node = relay.recvfrom(64)
    relay.sendto(answer(KEY, question), node)
    loop.read()
    loop.turn()


def test_a_lease_that_has_run_out_must_be_asked_for_and_can_be_had_again(held):
    made, relay, loop, over = held
    for _ in range(2):
        loop.now += LEASE_TIMEOUT
        assert not made.held
        loop.turn()
    assert len(over) == 2  # as long as it lasts, whatever was started meanwhile is ended
    answered(relay, loop)
    assert made.held and len(over) == 2


def test_a_lease_that_is_given_up_must_neither_ask_nor_run_out(held):
    made, relay, loop, over = held
    relay.recvfrom(64)
    made.end()
    loop.now += 2 * LEASE_TIMEOUT
    loop.turn()
    relay.setblocking(False)
    with pytest.raises(BlockingIOError):
        relay.recvfrom(64)
    assert loop.read is None and not loop.due and not over
    made.end()


def test_a_relay_that_cannot_be_reached_must_be_asked_again(monkeypatch):
    loop, over = Now(), []
    monkeypatch.setattr(lease, "time", loop)
    made = Lease(loop, KEY, ("255.255.255.255", 9), lambda: over.append(loop.now))  # which this socket may not send to
    try:
        loop.turn()
        assert len(loop.due) == 1 and not over
    finally:
        made.end()


def test_a_relay_must_not_answer_what_the_key_of_a_connection_is_made_of():
    words = b"link " + b"0" * 64
    assert answer(KEY, words) != hmac.digest(KEY, words, "sha256")


def test_a_node_that_is_cut_off_must_end_whatever_starts_until_there_is_an_answer(held):
    made, relay, loop, over = held
    loop.now += LEASE_TIMEOUT
    loop.turn()
    loop.now += 1
    loop.turn()
    assert over == [loop.now - 1, loop.now]
    answered(relay, loop)
    assert made.held and len(over) == 2


def test_a_relay_to_which_there_is_no_way_must_be_asked_again(monkeypatch):
    loop, over = Now(), []
    monkeypatch.setattr(lease, "time", loop)
    made = Lease(loop, KEY, ("255.255.255.255", 9), lambda: over.append(loop.now))  # to which no process may write
    loop.turn()
    loop.now += LEASE_TIMEOUT
    loop.turn()
    assert over == [loop.now] and len(loop.due) == 1
    made.end()


def test_a_relay_must_be_asked_several_times_before_the_lease_is_over():
    assert 4 * lease.RENEW_INTERVAL <= LEASE_TIMEOUT


def test_a_relay_must_answer_every_question_with_the_key(tmp_path):
    (tmp_path / "key").write_bytes(KEY)
    port = free_port()
    env = os.environ | {"NODE_MODE": "relay", "NODE_PORT": str(port), "NODE_KEY": KEY.hex()}
    relay = subprocess.Popen([sys.executable, str(ROOT / "orchestrate" / "node")], env=env)
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as node:
            node.settimeout(0.05)

            def asks() -> bytes:
                node.sendto(b"a question of 16", ("127.0.0.1", port))
                try:
                    return node.recv(64)
                except OSError:  # it does not listen yet
                    return b""

            assert eventually(asks) == answer(KEY, b"a question of 16")
    finally:
        relay.kill()
        relay.wait()


def test_a_relay_must_go_on_where_an_answer_cannot_be_sent_and_answer_no_answer(monkeypatch):
    class Enough(Exception):
        pass

    class Wire:
        """A socket over which the first node cannot be reached."""

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
        lease.relay(KEY, 1)
    assert Wire.sent == [(answer(KEY, b"of the second on"), "the second node")]


def test_a_node_must_ask_the_last_relay_alone_that_it_was_told_of(monkeypatch):
    class Asking:
        made = []

        def __init__(self, loop, key, address, over) -> None:
            self.address, self.ended = address, False
            self.made.append(self)

        def end(self) -> None:
            self.ended = True

    monkeypatch.setattr(wait, "Lease", Asking)
    node = wait.Agent(SimpleNamespace(), KEY)
    for port in (1, 2):
        node.receive(SimpleNamespace(), {"ask": "lease", "relay": ["10.0.0.1", port]})
    assert [(one.address, one.ended) for one in Asking.made] == [(("10.0.0.1", 1), True), (("10.0.0.1", 2), False)]
