"""A node must refuse invalid requests with a reason and without any effect, and keep running."""

import contextlib
import json
import os
import socket
from collections.abc import Iterator

import pytest
from support.agents import PRELOAD, Waiting, dial
from support.ends import End
from support.tcp_node import Node
from support.waiting import eventually

from orchestrate.node.messages import protocol

START = {"ask": "start", "command": ["x.py"], "env": {"RANK": "0"}, "inherit": False, "cwd": None}
UPLOAD = {"ask": "upload", "folder": "/nowhere", "data": "", "offset": 0, "tag": ""}
SECRET = "a-secret-value"


def start(**fields: object) -> dict:
    return {**START, **fields}


def env(**values: object) -> dict:
    return start(env={"RANK": "0", "TOKEN": SECRET, **values})


REFUSED = [
    (b"nonsense", "not JSON"),
    (b"\xff", "not JSON"),
    (b'{"ask": "status"', "not JSON"),
    (b"[" * 200_000, "nested too deeply"),
    (b'{"ask": ' * 100_000, "nested too deeply"),
    (b'{"ask": "status", "x": ' + b"9" * 10_000 + b"}", "a number has more than 18 digits"),
    ([], "not a JSON object"),
    (7, "not a JSON object"),
    ("start", "not a JSON object"),
    (None, "not a JSON object"),
    ({}, "no request in it"),
    ({"say": "status"}, "no request in it"),
    ({"ask": 7}, "no request in it"),
    ({"ask": ["status"]}, "no request in it"),
    ({"ask": "fly\x1b[31m"}, r"unknown request 'fly\x1b[31m'"),
    ({"ask": "status", "x": 1}, "status: unknown field 'x'"),
    ({"ask": "start"}, "start: command is missing"),
    (start(command=[]), "start: command must be a list of texts"),
    (start(command="x.py"), "start: command must be a list of texts"),
    (start(command=["x.py", 7]), "start: command must be a list of texts"),
    (start(command=["x.py", "a\0b"]), "start: command must not contain a NUL byte"),
    (start(command=["x.py", "\ud800"]), "start: command has text that cannot be encoded"),
    (start(env=[]), "start: env must be an object of names and values"),
    (start(env={}), "start: env: RANK is missing"),
    (env(RANK="-1"), "start: env: RANK must be a whole number"),
    (env(RANK="٣"), "start: env: RANK must be a whole number"),
    (env(RANK="9" * 10), "start: env: RANK must be a whole number"),
    (env(TORCHELASTIC_RESTART_COUNT="x"), "start: env: TORCHELASTIC_RESTART_COUNT must be a whole number"),
    (env(NAME=7), "start: env: 'NAME' must be text"),
    (env(NAME=f"{SECRET}\0"), "start: env: 'NAME' must not contain a NUL byte"),
    (env(NAME="\ud800"), "start: env: 'NAME' has text that cannot be encoded"),
    (env(**{"A=B": ""}), "start: env: 'A=B' cannot be a name"),
    (env(**{"": ""}), "start: env: '' cannot be a name"),
    (env(**{"A\0": ""}), r"start: env: 'A\x00' cannot be a name"),
    (start(inherit=1), "start: inherit must be true or false"),
    (start(cwd=7), "start: cwd must be text"),
    (start(cwd="/\0"), "start: cwd must not contain a NUL byte"),
    (start(log=-1), "start: log must be a whole number"),
    (start(log=True), "start: log must be a whole number"),
    (start(log=0.5), "start: log must be a whole number"),
    ({"ask": "stop"}, "stop: kill is missing"),
    ({"ask": "stop", "kill": "no"}, "stop: kill must be true or false"),
    ({"ask": "lease"}, "lease: relay is missing"),
    ({"ask": "lease", "relay": ["10.0.0.1"]}, "lease: relay must be an IPv4 address and a port"),
    ({"ask": "lease", "relay": ["10.0.0.1", 65536]}, "lease: relay must be an IPv4 address and a port"),
    ({"ask": "lease", "relay": ["10.0.0.1", True]}, "lease: relay must be an IPv4 address and a port"),
    ({"ask": "lease", "relay": ["a" * 300, 1]}, "lease: relay must be an IPv4 address and a port"),
    ({"ask": "lease", "relay": {"a": 1, "b": 2}}, "lease: relay must be an IPv4 address and a port"),
    ({**UPLOAD, "data": 7}, "upload: data must be text"),
    ({**UPLOAD, "offset": -1}, "upload: offset must be a whole number"),
    ({**UPLOAD, "folder": "a\0"}, "upload: folder must not contain a NUL byte"),
    ({"ask": "changes", "folder": "/", "have": []}, "changes: have must be an object of names and lengths"),
    ({"ask": "changes", "folder": "/", "have": {"a": "1"}}, "changes: have must be an object of names and lengths"),
    ({"ask": "read", "folder": "/", "path": "\0", "offset": 0}, "read: path must not contain a NUL byte"),
    ({"ask": "read", "folder": "/", "path": "etc"}, "read: offset is missing"),
]


@pytest.fixture(scope="module")
def node(tmp_path_factory) -> Iterator[Waiting]:
    instance = Waiting(tmp_path_factory.mktemp("node"))
    yield instance
    instance.end()


@pytest.mark.parametrize(("message", "why"), REFUSED, ids=[why for _, why in REFUSED])
def test_an_invalid_request_must_be_refused_with_the_reason_and_have_no_effect(node, message, why):
    with dial(node.folder / "s") as sock:
        end = End(sock)
        end.send(message if isinstance(message, bytes) else json.dumps(message).encode())
        answer = end.hear()
        assert answer["say"] == "refused" and why in answer["error"]
        assert SECRET not in str(answer) and len(str(answer)) < 300
        if isinstance(message, dict):  # a client that speaks the protocol stays connected
            end.ask("status")
            assert end.hear()["say"] == "status"
        else:
            assert end.hear() is None
    assert node.status() == {"generation": -1, "codes": {}, "hints": {}, "running": {}}
    assert not (node.folder / "logs").exists()


def test_an_endless_message_must_be_refused(node):
    with dial(node.folder / "s") as sock:
        end = End(sock)
        end.ask("status")
        assert end.hear()["say"] == "status"
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            sock.sendall(b"x" * (3 << 20))
        assert end.hear()["error"] == "the message is longer than 1048576 bytes"
    assert node.status()["generation"] == -1


def test_half_a_message_must_have_no_effect_when_its_sender_is_gone(node):
    with dial(node.folder / "s") as sock:
        end = End(sock)
        end.meet()
        sock.sendall(end.signer.sign(b'{"ask": "end"}'))
    assert node.status()["generation"] == -1 and node.node.poll() is None


def test_bytes_that_are_not_text_must_reach_a_worker(tmp_path):
    argument = os.fsdecode(b"no text \xff")
    for preload in ("", PRELOAD):
        folder = tmp_path / f"node-{preload}"
        folder.mkdir()
        node = Waiting(folder, preload)
        script = folder / "0.py"
        script.write_text("import os, sys\nprint(os.environb[b'ODD'], os.fsencode(sys.argv[1]))")
        node.command(0, str(script), argument, ODD=argument)
        assert node.code(0) == 0
        assert node.log(0) == r"b'no text \xff' b'no text \xff'" + "\n"
        node.end()


@pytest.mark.parametrize("preload", ["", PRELOAD], ids=["fresh", "warm"])
@pytest.mark.parametrize("cores", ["9" * 25, "-1", "1,,2"])
def test_invalid_core_numbers_must_not_end_a_node(tmp_path, preload, cores):
    node = Waiting(tmp_path, preload)
    (tmp_path / "0.py").write_text("print('ran')")
    node.command(0, str(tmp_path / "0.py"), WORKER_CORES=cores)
    assert node.code(0) == 0
    node.end()


def test_an_invalid_variable_inherited_from_the_node_must_be_refused(tmp_path):
    node = Waiting(tmp_path, TORCHELASTIC_RESTART_COUNT="many")
    node.pipe.ask("start", command=["x.py"], env={"RANK": "0"}, inherit=True, cwd=None)
    assert "TORCHELASTIC_RESTART_COUNT must be a whole number" in node.pipe.until("refused")["error"]
    assert node.status()["generation"] == -1
    node.end()


# --- over TCP


@pytest.fixture
def remote(tmp_path) -> Iterator[Node]:
    instance = Node(tmp_path)
    yield instance
    instance.end()


def test_a_client_with_the_key_must_get_the_reason_for_a_refusal(remote):
    link = remote.connect()
    link.sock.sendall(link.signer.sign(b'{"ask": "start"}') + b"\n")
    assert remote.until(link, protocol.Refusal).error == "start: command is missing"
    assert link.converse(protocol.GetStatus(), protocol.Status).generation == -1


@pytest.mark.parametrize("data", ["no base64", "A"])
def test_invalid_base64_must_be_refused(remote, data):
    link = remote.connect()
    link.send(protocol.Upload(str(remote.job), data, 0, ""))
    assert remote.until(link, protocol.Failed).error
    assert link.converse(protocol.GetStatus(), protocol.Status).generation == -1


@pytest.mark.parametrize("address", ["a" * 70, "\ud800", ".", "a..b", ""])
def test_an_invalid_master_name_must_not_end_the_node(remote, address):
    link = remote.connect()
    env = {"RANK": "0", "JOB_DIR": str(remote.job), "MASTER_ADDR": address}
    link.send(protocol.Start(["-c", "print('ran')"], env, inherit=True, cwd=str(remote.folder)))
    if address == "\ud800":
        assert "'MASTER_ADDR' has text that cannot be encoded" in remote.until(link, protocol.Refusal).error
    else:
        assert remote.until(link, protocol.Ended).code == 0


@pytest.mark.parametrize("first", [b"x" * 100_000, b"nonsense\n", b"\n", b"0" * 32 + b"\n{}\n", b"GET / HTTP/1.1\r\n"])
def test_a_client_without_the_key_must_get_no_answer(remote, first):
    with eventually(remote.dial) as sock:
        sock.settimeout(30)
        greeting = b""
        while not greeting.endswith(b"\n"):
            greeting += sock.recv(1)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            sock.sendall(first)
            assert sock.recv(1) == b""
    assert remote.connect().converse(protocol.GetStatus(), protocol.Status).generation == -1


def test_no_datagram_must_end_a_relay(tmp_path):
    port = Node(tmp_path)  # for a free port and a key
    port.end()
    node = Waiting(tmp_path, NODE_MODE="relay", NODE_PORT=str(port.port))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.settimeout(0.2)

        def ask(question: bytes) -> bytes:
            sock.sendto(question, ("127.0.0.1", port.port))
            with contextlib.suppress(OSError):  # it does not listen yet
                return sock.recv(1000)
            return b""

        assert len(eventually(lambda: ask(b"q" * 16))) == 32
        for datagram in (b"", b"x" * 60_000, b"\n", b"link " + b"0" * 64, b"a" * 32):
            assert not ask(datagram)
            assert len(eventually(lambda: ask(b"q" * 16))) == 32
    node.node.kill()
    node.node.wait()
    node.pipe.process.kill()
    node.pipe.close(-9)
