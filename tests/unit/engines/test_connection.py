"""Messages from a node must arrive complete in chunks of any size, and invalid data must end the connection."""

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from support.agents import PIPE
from support.ends import KEY, End, connected, listening
from support.fake_nodes import Nodes
from support.messages import encoded, message
from support.optional import not_none
from support.scripted import Clock

from orchestrate.engines import connection as links
from orchestrate.engines import sockets
from orchestrate.engines.base import Stop
from orchestrate.engines.connection import NodeConnection
from orchestrate.engines.docker.client import Frames
from orchestrate.engines.ports import free_port, port
from orchestrate.engines.sockets import connect
from orchestrate.errors import EngineError
from orchestrate.node.messages import protocol
from orchestrate.node.messages.auth import Signer
from orchestrate.node.programs import pipe

MESSAGES = [message("status"), message("refused", error="ä" * 300)]
LINES = b"".join(protocol.encode(one) + b"\n" for one in MESSAGES)


@pytest.fixture
def ends():
    link, node = connected()
    yield link, node
    link.close()
    node.sock.close()


@pytest.mark.parametrize("size", [1, 7, 100, 10_000])
def test_messages_must_be_assembled_from_chunks(ends, size):
    link, node = ends
    received = []
    wire = b"".join(node.signer.sign(line) + b"\n" for line in LINES.splitlines())
    for start in range(0, len(wire), size):
        node.sock.sendall(wire[start : start + size])
        received += link.receive()
    assert received == MESSAGES


def test_an_invalid_message_must_end_the_connection(ends):
    link, node = ends
    node.sock.sendall(b"OCI runtime exec failed: exec failed: container not running\n")
    assert link.receive() is None


def test_an_endless_message_must_end_the_connection(ends):
    link, node = ends
    link.partial = b"x" * protocol.MAX_REPORT
    node.sock.sendall(b"x")
    assert link.receive() is None


def test_a_closed_connection_must_not_accept_requests(ends):
    link, node = ends
    node.sock.close()
    assert link.receive() is None
    assert not link.send(protocol.GetStatus())


def nodes_with_workers(generation: int, ranks: int) -> Nodes:
    """Nodes with one running worker each, ranks 0 to `ranks` - 1."""
    engine = Nodes(0)
    engine.generation, engine.running = generation, {rank: f"node-{rank}" for rank in range(ranks)}
    return engine


def test_exits_must_be_reported_in_the_order_in_which_they_occurred():
    engine = nodes_with_workers(0, 3)
    for rank, code, at in ((2, 1, 12.5), (0, 1, 12.0), (1, 139, 11.5)):
        engine._handle(f"node-{rank}", message("ended", rank=rank, code=code, at=at))
    assert [(exit.rank, exit.code) for exit in engine.wait(0)] == [(1, 139), (0, 1), (2, 1)]


@pytest.mark.parametrize(("generation", "known"), [(0, False), (1, True), (2, False)])
def test_only_the_status_of_the_current_generation_must_count(generation, known):
    engine = nodes_with_workers(1, 2)
    state = message("status", generation=generation, codes={"0": 3}, hints={"0": ""}, running={"1": {}})
    assert [engine.update_worker(rank, state) for rank in (0, 1)] == [known, known]
    assert [exit.code for exit in engine.wait(0)] == [3] * known
    assert engine.pids == {1: 7} if known else not engine.pids


def test_workers_that_have_not_started_must_end_immediately_when_the_job_is_stopped():
    engine = nodes_with_workers(0, 3)
    workers: list[Any] = [SimpleNamespace(rank=rank) for rank in (1, 2)]
    engine.queued = workers
    engine.stop(Stop.TERMINATE)
    assert [(exit.rank, exit.code, exit.stopping) for exit in engine.wait(0)] == [(1, 143, True), (2, 143, True)]
    assert engine.running == {0: "node-0"} and not engine.queued


def test_connecting_to_a_missing_node_must_end_at_the_timeout():
    command = [sys.executable, "-I", "-S", PIPE, "127.0.0.1", str(free_port()), "0.1"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=30)
    assert done.returncode == 1 and b"refused" in done.stderr


@pytest.mark.parametrize("over", ["tcp", "unix"])
@pytest.mark.parametrize("first", ["node", "orchestrator"])
def test_data_must_be_relayed_in_both_directions_until_one_side_closes(tmp_path, over, first):
    family, address = (socket.AF_INET, ("127.0.0.1", 0)) if over == "tcp" else (socket.AF_UNIX, str(tmp_path / "s"))
    with socket.socket(family) as server:
        server.bind(address)
        server.listen()
        server.settimeout(60)
        arguments = ["127.0.0.1", str(server.getsockname()[1]), "60"] if over == "tcp" else []
        env = os.environ | {"NODE_SOCKET": str(tmp_path / "s")}
        with subprocess.Popen(
            [sys.executable, "-I", "-S", PIPE, *arguments], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as process:
            node, _ = server.accept()
            with node, node.makefile("rb") as file:
                text = os.urandom(150_000)  # more than a single read returns
                not_none(process.stdin).write(text)
                not_none(process.stdin).flush()
                assert file.read(len(text)) == text
                node.sendall(text)
                assert not_none(process.stdout).read(len(text)) == text
                if first == "orchestrator":
                    not_none(process.stdin).close()
                    assert file.read() == b""
            assert not_none(process.stdout).read() == b""
            assert process.wait(timeout=60) == 0


def test_the_connect_timeout_must_not_apply_after_connecting():
    with socket.create_server(("127.0.0.1", 0)) as server:
        node = pipe.connect(["127.0.0.1", str(server.getsockname()[1]), "60"])
        assert node.gettimeout() is None  # the connect timeout is cleared
        node.close()


@pytest.mark.parametrize("size", [1, 3, 8, 50, 10_000])
def test_engine_frames_must_be_removed_and_stderr_must_be_dropped(size):
    def frame(stream: int, content: bytes) -> bytes:
        return bytes([stream, 0, 0, 0]) + len(content).to_bytes(4, "big") + content

    wire = frame(1, LINES[:10]) + frame(2, b"a warning\n") + frame(1, b"") + frame(1, LINES[10:])
    frames = Frames()
    assert b"".join(frames.stdout(wire[i : i + size]) for i in range(0, len(wire), size)) == LINES


# --- one connection


@contextlib.contextmanager
def unauthenticated() -> Iterator[tuple[NodeConnection, socket.socket]]:
    """A connection before the handshake, and its other end."""
    here, there = socket.socketpair()
    there.settimeout(10)
    link = NodeConnection(here, KEY)
    try:
        yield link, there
    finally:
        link.close()
        there.close()


def test_an_answer_must_be_found_among_other_messages(ends):
    link, node = ends
    node.send(encoded("started"))
    node.send(encoded("changes", gone=["a"]))
    assert link.converse(protocol.GetChanges("job", {"a": 3}), protocol.Changes) == message("changes", gone=["a"])
    assert node.hear() == {"ask": "changes", "folder": "job", "have": {"a": 3}}


@pytest.mark.parametrize("say", ["failed", "refused"])
def test_a_failed_request_must_raise_the_nodes_error_message(ends, say):
    link, node = ends
    node.send(json.dumps({"say": say, "error": "no space\nleft"}).encode())
    with pytest.raises(EngineError, match="node error: no space left"):
        link.converse(protocol.GetChanges("job", {}), protocol.Changes)


def test_converse_must_wait_as_long_as_requested(ends, monkeypatch):
    link, node = ends
    monkeypatch.setattr(links, "ANSWER_TIMEOUT", 0.01)
    threading.Timer(0.1, node.send, (encoded("changes"),)).start()
    assert link.converse(protocol.GetChanges("job", {}), protocol.Changes, patience=10) == message("changes")


def test_converse_must_raise_if_the_node_is_silent_or_gone(ends):
    link, node = ends
    with pytest.raises(ConnectionError):
        link.converse(protocol.GetChanges("job", {}), protocol.Changes, patience=0.01)
    node.sock.close()
    with pytest.raises(ConnectionError):
        link.converse(protocol.GetChanges("job", {}), protocol.Changes)


def test_other_messages_must_not_extend_the_timeout_of_converse(ends, monkeypatch):
    link, node = ends
    clock = Clock()
    monkeypatch.setattr(links, "time", clock)

    def later(chunk: bytes) -> bytes:
        clock.sleep(1)  # for each chunk received
        return chunk

    def send_messages() -> None:
        with contextlib.suppress(OSError):  # the other end closes after the timeout
            for line in [encoded("cleaned", text="x" * (1 << 16))] * 3 + [encoded("changes")]:
                node.send(line)

    link.decode, sender = later, threading.Thread(target=send_messages)
    sender.start()
    with pytest.raises(ConnectionError):
        link.converse(protocol.GetChanges("job", {}), protocol.Changes, patience=2)
    link.close()
    sender.join()


def test_sending_to_a_node_that_reads_nothing_must_time_out(ends):
    link, _ = ends
    link.sock.settimeout(0.05)
    assert not link.send(protocol.Start(["x"], {"A": "x" * (1 << 24)}, inherit=True))


def test_a_connection_must_exchange_nonces_and_then_authenticate_each_line():
    with unauthenticated() as (link, there):
        node = Signer(KEY, listens=True)
        there.sendall(node.nonce[:5])
        timeouts, received = [], []

        def finish() -> None:
            timeouts.append(not_none(link.sock.gettimeout()))
            there.sendall(node.nonce[5:] + b"\n")
            nonce, proof, rest = there.recv(1000).split(b"\n")
            node.meet(nonce)
            received.extend((node.verify(proof), rest))
            there.sendall(node.sign(b"") + b"\n")

        threading.Timer(0.05, finish).start()
        assert link.greet(9)
        assert 0 < timeouts[0] <= 9 and link.sock.gettimeout() == links.ANSWER_TIMEOUT and received == [b"", b""]
        there.sendall(node.sign(encoded("status").rstrip()) + b"\n")
        assert link.receive() == [message("status")]
        assert link.send(protocol.Dump())
        assert json.loads(node.verify(there.recv(1000).rstrip(b"\n"))) == {"ask": "dump"}
        there.sendall(encoded("status"))  # without the key
        assert link.receive() is None


@pytest.mark.parametrize("answer", [b"no nonce\n", b"", None, b"0" * 1000, b"0" * 100_000])
def test_a_connection_must_be_closed_if_the_handshake_fails(answer):
    with unauthenticated() as (link, there):
        if answer is not None:
            there.sendall(answer)
            there.shutdown(socket.SHUT_WR)
        assert not link.greet(0.01)
        assert link.sock.fileno() == -1 and len(link.partial) <= 1 << 16  # of an endless line, one piece is read


def test_requests_must_not_be_sent_to_a_listener_without_the_key():
    with unauthenticated() as (link, there):
        there.sendall(b"0" * 32 + b"\n" + b"0" * 64 + b" \n")  # a nonce and an invalid proof
        assert not link.greet(10)
        assert there.recv(1000).count(b"\n") == 2


def test_a_proof_must_not_be_any_other_line_that_is_signed_with_the_key():
    with unauthenticated() as (link, there):
        node = Signer(KEY, listens=True)
        answers: list[bool] = []
        greets = threading.Thread(target=lambda: answers.append(link.greet(10)))
        there.sendall(node.nonce + b"\n")
        greets.start()
        node.meet(there.recv(1000).split(b"\n")[0])
        there.sendall(node.sign(encoded("status").rstrip()) + b"\n")
        greets.join()
        assert answers == [False]


def test_close_must_reach_the_node_even_if_another_process_holds_the_socket():
    with unauthenticated() as (link, there), link.sock.dup():
        link.close()
        assert there.recv(1) == b""
        link.close()


# --- sockets in folders


def test_a_socket_with_a_long_path_must_be_reachable_without_leaking_descriptors(tmp_path):
    folder = tmp_path / ("f" * 100) / ("g" * 100)
    folder.mkdir(parents=True)
    with listening(folder, "s") as server:
        connections = []
        dialer = threading.Thread(target=lambda: connections.append(connect(folder / "s", KEY)))
        dialer.start()
        there, _ = server.accept()
        with there:
            node = End(there, listens=True)
            node.meet()
            dialer.join()
            assert connections[0].send(protocol.GetStatus()) and node.hear() == {"ask": "status"}
        connections[0].close()
        for path in (folder / "none", tmp_path / "none" / "s"):
            with pytest.raises(FileNotFoundError):
                connect(path, KEY)
        open_files = {os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")}
        assert str(folder) not in open_files


def test_connect_must_wait_for_a_missing_socket_but_not_for_a_missing_listener(tmp_path, monkeypatch):
    servers: list[socket.socket] = []

    def greet() -> None:
        with servers[0].accept()[0] as there:
            End(there, listens=True).meet()

    def listen(_: float) -> None:
        if not servers:
            servers.append(listening(tmp_path, "late"))
            threading.Thread(target=greet).start()

    monkeypatch.setattr(links.time, "sleep", listen)
    connect(tmp_path / "late", KEY, lambda: True).close()
    servers[0].close()
    with pytest.raises(ConnectionRefusedError):
        connect(tmp_path / "late", KEY, lambda: True)


def test_connect_must_wait_for_a_socket_only_while_its_node_may_create_it(tmp_path, monkeypatch):
    now, alive = [0.0], [True, True, False]
    monkeypatch.setattr(sockets.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(sockets.time, "sleep", lambda _: now.append(now.pop() + 0.3))
    with pytest.raises(FileNotFoundError):
        connect(tmp_path / "never", KEY, lambda: alive.pop(0))
    assert alive == [] and 2 < now[0] < 4


def test_only_a_socket_must_be_connected_to_and_no_link_be_followed_to_another_node(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("other")
    (tmp_path / "folder").symlink_to(tmp_path)
    with listening(tmp_path, "other"):
        before = len(os.listdir("/proc/self/fd"))
        for name in ("file", "link"):
            with pytest.raises(ConnectionRefusedError, match=f"{name} is not a socket"):
                connect(tmp_path / name, KEY)
        with pytest.raises(NotADirectoryError):
            connect(tmp_path / "folder" / "other", KEY)
        assert len(os.listdir("/proc/self/fd")) <= before


def test_connect_must_refuse_a_listener_that_is_not_the_node(tmp_path):
    with listening(tmp_path, "s") as server:

        def send_message() -> None:
            with server.accept()[0] as there:
                there.sendall(b'{"say": "clean"}\n')

        sender = threading.Thread(target=send_message)
        sender.start()
        with pytest.raises(ConnectionRefusedError, match="is not the node"):
            connect(tmp_path / "s", KEY)
        sender.join()


# --- ports


def test_each_generation_must_use_a_different_port_from_the_previous_one():
    assert [port("bridge", generation) for generation in (0, 1, 999, 1000)] == [29500, 29501, 30499, 29500]


def test_a_port_must_be_free_and_below_the_ephemeral_range(monkeypatch):
    assert {port for port in (free_port() for _ in range(20)) if not 20000 <= port < 30000} == set()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        used, free = taken.getsockname()[1], free_port()
        monkeypatch.setattr(random, "sample", lambda *_: [used, free, used])
        assert free_port() == port("", 3) == port("host", 3) == free  # other jobs may use ports of the same host
        monkeypatch.setattr(random, "sample", lambda *_: [used, used])
        with pytest.raises(EngineError, match="no free port"):
            free_port()


def test_trying_a_socket_must_leave_nothing_behind_and_fail_where_none_can_be(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    assert sockets.possible(tmp_path) and not sockets.possible(tmp_path / "none")
    assert not [*tmp_path.iterdir()] and len(os.listdir("/proc/self/fd")) <= before
