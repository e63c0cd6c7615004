"""A node must take so many clients and no more, and go on whatever becomes of a connection."""

import contextlib
import errno
import json
import select
import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from conftest import eventually
from support.agents import Waiting
from support.ends import KEY, End
from test_asked import dial
from test_sync import Node

from orchestrate.engines.connection import NodeConnection
from orchestrate.node import listener, protocol
from orchestrate.node.auth import Signer
from orchestrate.node.listener import MAX_CLIENTS, Listener, serve

ASKS = b'{"ask": "status"}\n'


class Turns:
    """The node's loop and its clock, whose turns and time are the test's."""

    def __init__(self) -> None:
        self.now, self.due, self.watched = 1000.0, [], {}

    def monotonic(self) -> float:
        return self.now

    def watch(self, source, callback) -> None:
        self.watched[source] = callback

    def forget(self, source) -> None:
        del self.watched[source]

    def after(self, seconds: float, callback) -> None:
        self.due.append((self.now + seconds, callback))

    def turn(self, seconds: float = 0.0) -> None:
        """Go on by some seconds, and read what is there."""
        self.now += seconds
        while due := [timer for timer in self.due if timer[0] <= self.now]:
            for timer in due:
                self.due.remove(timer)
                timer[1]()
        for source in list(self.watched):
            if source in self.watched and select.select([source], [], [], 0)[0]:
                self.watched[source]()


@pytest.fixture
def place(monkeypatch, tmp_path) -> Iterator[SimpleNamespace]:
    """A listener, the loop that it is in, what it has received, and clients of it."""
    loop, clients, heard = Turns(), [], []
    for module in ("loop", "listener"):
        monkeypatch.setattr(f"orchestrate.node.{module}.time", loop)
    server = socket.create_server(("127.0.0.1", 0), backlog=2 * MAX_CLIENTS)

    def client() -> socket.socket:
        clients.append(made := socket.create_connection(server.getsockname()))
        made.settimeout(10)
        loop.turn()
        return made

    def listen(key: bytes) -> Listener:
        return Listener(loop, server, lambda channel, message: heard.append((channel, message)), key)

    yield SimpleNamespace(loop=loop, server=server, client=client, heard=heard, listen=listen)
    for each in [*clients, *loop.watched]:
        each.close()


def hears(sock: socket.socket) -> bytes:
    """What the listener says until it ends the connection."""
    with sock.makefile("rb") as file:
        return file.read()


def ask(sock: socket.socket, loop: Turns) -> None:
    """Ask over a connection on which nothing was said yet."""
    asks = threading.Thread(target=End(sock).send, args=(ASKS,))
    asks.start()
    while asks.is_alive():
        loop.turn()


def proven(sock: socket.socket, loop: Turns) -> Signer:
    """Show that a client knows the key."""
    signer = Signer(KEY, listens=False)
    signer.meet(sock.recv(100).rstrip(b"\n"))
    sock.sendall(signer.nonce + b"\n" + signer.sign(ASKS[:-1]) + b"\n")
    loop.turn()
    return signer


def test_the_oldest_client_without_a_request_must_be_dropped_for_a_new_one(place):
    place.listen(KEY)
    clients = [place.client() for _ in range(MAX_CLIENTS)]
    ask(clients[0], place.loop)
    place.loop.turn()
    place.client()
    assert len(hears(clients[1])) == 33  # its word
    clients[2].setblocking(False)
    assert len(clients[2].recv(100)) == 33
    with pytest.raises(BlockingIOError):
        clients[2].recv(1)
    (first, asked), (gone, end) = place.heard
    assert asked == {"ask": "status"} and end is None and gone is not first


def test_a_client_must_be_rejected_if_all_others_have_sent_requests(place):
    place.listen(KEY)
    clients = [place.client() for _ in range(MAX_CLIENTS)]
    for client in clients:
        ask(client, place.loop)
    place.loop.turn()
    assert hears(place.client()) == b""
    clients[7].close()
    place.loop.turn()
    late = place.client()
    ask(late, place.loop)
    place.loop.turn()
    assert [message for _, message in place.heard].count({"ask": "status"}) == MAX_CLIENTS + 1


def test_an_authenticated_client_must_have_no_deadline_for_its_request(place):
    place.listen(KEY)
    friend = place.client()
    link = NodeConnection(friend, KEY)
    greets = threading.Thread(target=link.greet, args=(30,))
    greets.start()
    while greets.is_alive():
        place.loop.turn()
    for _ in range(3):
        place.loop.turn(listener.PROOF_TIMEOUT)
    assert link.send(protocol.GetStatus())
    place.loop.turn()
    assert [message for _, message in place.heard] == [{"ask": "status"}]


def test_only_unauthenticated_clients_must_be_disconnected_at_the_deadline(place):
    place.listen(KEY)
    stranger, friend = place.client(), place.client()
    proven(friend, place.loop)
    place.loop.turn(listener.PROOF_TIMEOUT - 1)
    late = place.client()
    place.loop.turn(2)
    assert len(hears(stranger)) == 33  # its word
    proven(late, place.loop)
    for _ in range(30):
        place.loop.turn(1)
    assert not place.loop.due  # nothing is waited for any more
    for client in (late, friend):
        assert len(client.recv(100)) == 66  # its proof
        client.setblocking(False)
        with pytest.raises(BlockingIOError):
            client.recv(1)
    assert [message for _, message in place.heard] == [{"ask": "status"}, None, {"ask": "status"}]


def test_unauthenticated_clients_must_not_lock_out_authenticated_ones(place):
    place.listen(KEY)
    friend = place.client()
    proven(friend, place.loop)
    strangers = [place.client() for _ in range(3 * MAX_CLIENTS)]
    second = place.client()
    signer = proven(second, place.loop)
    assert [message for _, message in place.heard if message] == [{"ask": "status"}] * 2
    assert len(hears(strangers[0])) == 33
    assert len(place.loop.watched) == MAX_CLIENTS + 1 and len(place.loop.due) == 1
    friend.sendall(b"nonsense\n")
    place.loop.turn()
    assert b"refused" not in hears(friend)
    second.sendall(signer.sign(b"7") + b"\n")
    place.loop.turn()
    proof, refusal = hears(second).splitlines()
    assert (
        signer.verify(proof) == b""
        and json.loads(signer.verify(refusal))["error"] == "the message is not a JSON object"
    )


@pytest.mark.parametrize("number", [errno.ECONNABORTED, errno.EPROTO, errno.EMFILE, errno.ENFILE])
def test_a_failed_accept_must_be_retried(number):
    class Server:
        fails = True

        def setblocking(self, flag: bool) -> None:
            assert not flag

        def accept(self) -> tuple[str, str]:
            if self.fails:
                raise OSError(number, "")
            return "connection", "address"

    loop, server, taken = Turns(), Server(), []
    serve(loop, server, lambda *each: taken.append(each))
    loop.watched[server]()
    server.fails = False
    if number in (errno.EMFILE, errno.ENFILE):
        assert server not in loop.watched  # which would be readable all the time
        ((_, again),) = loop.due
        again()
    loop.watched[server]()
    assert taken == [("connection", "address")]


# --- real nodes


def test_more_connections_than_descriptors_must_not_end_a_node(tmp_path):
    limit = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))"
    node = Waiting(tmp_path, before=limit)
    assert node.status()["generation"] == -1
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(dial(tmp_path / "s")) for _ in range(330)]
        assert node.status()["generation"] == -1
        for sock in socks[-20:]:
            with contextlib.suppress(OSError):
                sock.sendall(ASKS)
        assert node.status()["generation"] == -1
    assert node.status()["generation"] == -1  # so the others have gone
    assert node.run(0, "print('ran')") == 0
    node.end()


def test_many_unauthenticated_connections_must_not_lock_out_an_orchestrator(tmp_path):
    node = Node(tmp_path)
    try:
        assert node.connect().converse(protocol.GetStatus(), protocol.Status).generation == -1
        with contextlib.ExitStack() as stack:
            for _ in range(330):
                stack.enter_context(eventually(node.dial))
            assert node.connect().converse(protocol.GetStatus(), protocol.Status).generation == -1
    finally:
        node.end()


def test_a_client_that_does_not_read_must_be_disconnected(tmp_path):
    node = Waiting(tmp_path, before="loop.SEND_TIMEOUT = 0.2")
    assert node.status()["generation"] == -1
    with dial(tmp_path / "s") as sock, contextlib.suppress(OSError):
        end = End(sock)
        while True:
            end.send(ASKS)
    assert node.run(0, "print('ran')") == 0
    node.end()
