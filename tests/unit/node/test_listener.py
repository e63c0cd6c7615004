"""A node must limit the number of its clients and survive any failure of a connection."""

import contextlib
import errno
import json
import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast

import pytest
from support.agents import Waiting, dial
from support.ends import KEY, End
from support.loops import ManualLoop
from support.optional import not_none
from support.tcp_node import Node
from support.waiting import eventually

from orchestrate.engines.connection import NodeConnection
from orchestrate.node.loop import Loop
from orchestrate.node.messages import listener, protocol
from orchestrate.node.messages.auth import Signer
from orchestrate.node.messages.listener import MAX_CLIENTS, Listener, serve

REQUEST = b'{"ask": "status"}\n'


@pytest.fixture
def harness(tmp_path) -> Iterator[SimpleNamespace]:
    """A loop, functions that create a listener and clients, and the messages that it has received."""
    loop, clients, received = ManualLoop(), [], []
    server = socket.create_server(("127.0.0.1", 0), backlog=2 * MAX_CLIENTS)

    def client() -> socket.socket:
        clients.append(sock := socket.create_connection(server.getsockname()))
        sock.settimeout(10)
        loop.turn()
        return sock

    def listen(key: bytes) -> Listener:
        return Listener(cast(Loop, loop), server, lambda channel, message: received.append((channel, message)), key)

    yield SimpleNamespace(loop=loop, server=server, client=client, received=received, listen=listen)
    for each in [*clients, *loop.watched]:
        each.close()


def read_to_end(sock: socket.socket) -> bytes:
    """All bytes that the listener sends until it closes the connection."""
    with sock.makefile("rb") as file:
        return file.read()


def ask(sock: socket.socket, loop: ManualLoop) -> None:
    """Send a request over a new connection."""
    sender = threading.Thread(target=End(sock).send, args=(REQUEST,))
    sender.start()
    while sender.is_alive():
        loop.turn()


def authenticate(sock: socket.socket, loop: ManualLoop) -> Signer:
    """Authenticate a client and send a request."""
    signer = Signer(KEY, listens=False)
    signer.meet(sock.recv(100).rstrip(b"\n"))
    sock.sendall(signer.nonce + b"\n" + signer.sign(REQUEST[:-1]) + b"\n")
    loop.turn()
    return signer


def test_the_oldest_client_without_a_request_must_be_dropped_for_a_new_one(harness):
    harness.listen(KEY)
    clients = [harness.client() for _ in range(MAX_CLIENTS)]
    ask(clients[0], harness.loop)
    harness.loop.turn()
    harness.client()
    assert len(read_to_end(clients[1])) == 33  # its nonce
    clients[2].setblocking(False)
    assert len(clients[2].recv(100)) == 33
    with pytest.raises(BlockingIOError):
        clients[2].recv(1)
    (first, request), (gone, end) = harness.received
    assert request == {"ask": "status"} and end is None and gone is not first


def test_a_client_must_be_rejected_if_all_others_have_sent_requests(harness):
    harness.listen(KEY)
    clients = [harness.client() for _ in range(MAX_CLIENTS)]
    for client in clients:
        ask(client, harness.loop)
    harness.loop.turn()
    assert read_to_end(harness.client()) == b""
    clients[7].close()
    harness.loop.turn()
    late = harness.client()
    ask(late, harness.loop)
    harness.loop.turn()
    assert [message for _, message in harness.received].count({"ask": "status"}) == MAX_CLIENTS + 1


def test_an_authenticated_client_must_have_no_deadline_for_its_request(harness):
    harness.listen(KEY)
    authenticated = harness.client()
    link = NodeConnection(authenticated, KEY)
    greeting = threading.Thread(target=link.greet, args=(30,))
    greeting.start()
    while greeting.is_alive():
        harness.loop.turn()
    for _ in range(3):
        harness.loop.turn(listener.PROOF_TIMEOUT)
    assert link.send(protocol.GetStatus())
    harness.loop.turn()
    assert [message for _, message in harness.received] == [{"ask": "status"}]


def test_only_unauthenticated_clients_must_be_disconnected_at_the_deadline(harness):
    harness.listen(KEY)
    stranger, authenticated = harness.client(), harness.client()
    authenticate(authenticated, harness.loop)
    harness.loop.turn(listener.PROOF_TIMEOUT - 1)
    late = harness.client()
    harness.loop.turn(2)
    assert len(read_to_end(stranger)) == 33  # its nonce
    authenticate(late, harness.loop)
    for _ in range(30):
        harness.loop.turn(1)
    assert not harness.loop.due  # no deadline is left
    for client in (late, authenticated):
        assert len(client.recv(100)) == 66  # its proof
        client.setblocking(False)
        with pytest.raises(BlockingIOError):
            client.recv(1)
    assert [message for _, message in harness.received] == [{"ask": "status"}, None, {"ask": "status"}]


def test_unauthenticated_clients_must_not_lock_out_authenticated_ones(harness):
    harness.listen(KEY)
    authenticated = harness.client()
    authenticate(authenticated, harness.loop)
    strangers = [harness.client() for _ in range(3 * MAX_CLIENTS)]
    second = harness.client()
    signer = authenticate(second, harness.loop)
    assert [message for _, message in harness.received if message] == [{"ask": "status"}] * 2
    assert len(read_to_end(strangers[0])) == 33
    assert len(harness.loop.watched) == MAX_CLIENTS + 1 and len(harness.loop.due) == 1
    authenticated.sendall(b"nonsense\n")
    harness.loop.turn()
    assert b"refused" not in read_to_end(authenticated)
    second.sendall(signer.sign(b"7") + b"\n")
    harness.loop.turn()
    proof, refusal = read_to_end(second).splitlines()
    assert (
        signer.verify(proof) == b""
        and json.loads(signer.verify(refusal))["error"] == "the message is not a JSON object"
    )


FULL = [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM]


@pytest.mark.parametrize("number", [errno.ECONNABORTED, errno.EPROTO, *FULL])
def test_a_failed_accept_must_be_retried(number):
    class Server:
        fails, descriptor = True, 3

        def setblocking(self, flag: bool) -> None:
            assert not flag

        def fileno(self) -> int:
            return self.descriptor

        def accept(self) -> tuple[str, str]:
            if self.fails:
                raise OSError(number, "")
            return "connection", "address"

    loop, server, accepted = ManualLoop(), Server(), []
    serve(cast(Loop, loop), cast(socket.socket, server), lambda *each: accepted.append(each))
    loop.watched[server]()
    server.fails = False
    if number in FULL:
        assert server not in loop.watched  # otherwise it would be readable all the time
        ((_, retry),) = loop.due
        server.descriptor = -1
        retry()
        assert server not in loop.watched  # it was closed
        server.descriptor = 3
        retry()
    loop.watched[server]()
    assert accepted == [("connection", "address")]


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
                sock.sendall(REQUEST)
        assert node.status()["generation"] == -1
    assert node.status()["generation"] == -1  # so the others were disconnected
    assert node.run(0, "print('ran')") == 0
    node.end()


def test_many_unauthenticated_connections_must_not_lock_out_an_orchestrator(tmp_path):
    node = Node(tmp_path)
    try:
        assert not_none(node.connect()).converse(protocol.GetStatus(), protocol.Status).generation == -1
        with contextlib.ExitStack() as stack:
            for _ in range(330):
                stack.enter_context(eventually(node.dial))
            assert not_none(node.connect()).converse(protocol.GetStatus(), protocol.Status).generation == -1
    finally:
        node.end()


def test_a_client_that_does_not_read_must_be_disconnected(tmp_path):
    node = Waiting(tmp_path, before="channel.SEND_TIMEOUT = 0.2")
    assert node.status()["generation"] == -1
    with dial(tmp_path / "s") as sock, contextlib.suppress(OSError):
        end = End(sock)
        while True:
            end.send(REQUEST)
    assert node.run(0, "print('ran')") == 0
    node.end()
