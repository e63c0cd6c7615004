"""Messages between orchestrator and node must be authenticated with the job's key."""

import os
import subprocess
import sys

import pytest
from support.agents import NODE, PRELOAD, Waiting

from orchestrate.node.messages.auth import Signer


def pair(key: bytes = b"key", other: bytes = b"key") -> tuple[Signer, Signer]:
    node, host = Signer(key, listens=True), Signer(other, listens=False)
    node.meet(host.nonce)
    host.meet(node.nonce)
    return node, host


def test_lines_must_arrive_in_both_directions():
    node, host = pair()
    for text in (b"{}", b"two words", b""):
        assert node.verify(host.sign(text)) == text
        assert host.verify(node.sign(text)) == text


def test_lines_sent_at_the_same_time_must_arrive():
    node, host = pair()
    requests, report = [host.sign(b"1"), host.sign(b"2")], node.sign(b"3")
    assert host.verify(report) == b"3"
    assert [node.verify(line) for line in requests] == [b"1", b"2"]


def test_only_a_nonce_must_be_accepted_as_the_first_line():
    signer = Signer(b"key", listens=True)
    assert not signer.ready
    with pytest.raises(ValueError):
        signer.meet(b"0" * 32 + b"\n")
    assert not signer.ready
    signer.meet(b"0" * 32)
    assert signer.ready


def test_a_line_from_a_peer_without_the_key_must_be_refused():
    node, host = pair(other=b"guess")
    with pytest.raises(ValueError):
        node.verify(host.sign(b"start"))


@pytest.mark.parametrize("tampering", ["changed", "repeated", "left out", "sent back", "without proof"])
def test_a_line_that_was_tampered_with_must_be_refused(tampering):
    node, host = pair()
    first, second = host.sign(b"first"), host.sign(b"second")
    line = {
        "changed": first.replace(b"first", b"other"),
        "repeated": first,
        "left out": second,
        "sent back": node.sign(b"first"),
        "without proof": b"first",
    }[tampering]
    if tampering == "repeated":
        node.verify(first)
    with pytest.raises(ValueError):
        node.verify(line)


@pytest.mark.parametrize("nonce", [b"", b"ask 0123", b"0" * 31, b"0" * 33, b"G" * 32])
def test_an_invalid_nonce_must_not_become_part_of_the_key(nonce):
    node, _ = pair()
    with pytest.raises(ValueError):
        node.meet(nonce)


def test_a_line_from_another_connection_must_be_refused():
    _, host = pair()
    node, _ = pair()
    with pytest.raises(ValueError):
        node.verify(host.sign(b"start"))


def test_a_replayed_connection_must_be_refused():
    node, host = pair()
    line = host.sign(b"start")
    assert node.verify(line) == b"start"
    again = Signer(b"key", listens=True)
    again.meet(host.nonce)
    with pytest.raises(ValueError):
        again.verify(line)


SENDS_REQUESTS = """
import os, socket
assert "NODE_KEY" not in os.environ
for address in (os.environ["NODE_SOCKET"], os.environ["NODE_SOCKETS"] + "/" + socket.gethostname()):
    for line in (b'{"ask": "end"}', b"0" * 64 + b' {"ask": "end"}'):
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(30)
        sock.connect(address)
        nonce = sock.makefile("rb").readline()
        sock.sendall(nonce + line + b"\\n")
        assert len(nonce) == 33 and sock.recv(100) == b"", "it was answered"
"""


@pytest.mark.parametrize("preload", ["", PRELOAD])
def test_a_worker_must_be_ignored_since_it_has_no_key(tmp_path, preload):
    node = Waiting(tmp_path, preload, NODE_SOCKETS=str(tmp_path / "nodes"))
    assert node.run(0, SENDS_REQUESTS) == 0, node.log(0)
    assert node.run(1, "print('ran')") == 0  # the node is still running
    node.end()


@pytest.mark.parametrize("key", ["", "0" * 63, "x" * 64, "0" * 66])
def test_a_node_must_not_start_listening_without_a_key(tmp_path, key):
    env = os.environ | {"NODE_MODE": "agent", "NODE_SOCKET": str(tmp_path / "s"), "NODE_KEY": key}
    done = subprocess.run([sys.executable, NODE], env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "[node] error: NODE_KEY must be 64 hexadecimal digits\n")
    assert not (tmp_path / "s").exists()
