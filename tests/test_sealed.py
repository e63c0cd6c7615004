"""What goes over a network that others may reach must carry the job's key."""

import os
import subprocess
import sys

import pytest
from waiting import NODE, PRELOAD, Waiting

from orchestrate.node.sealed import Seal


def pair(key: bytes = b"key", other: bytes = b"key") -> tuple[Seal, Seal]:
    node, host = Seal(key, listens=True), Seal(other, listens=False)
    node.meet(host.word)
    host.meet(node.word)
    return node, host


def test_lines_must_arrive_both_ways():
    node, host = pair()
    for text in (b"{}", b"two words", b""):
        assert node.open(host.close(text)) == text
        assert host.open(node.close(text)) == text


def test_lines_that_meet_on_their_way_must_arrive():
    node, host = pair()
    asked, said = [host.close(b"1"), host.close(b"2")], node.close(b"3")
    assert host.open(said) == b"3"
    assert [node.open(line) for line in asked] == [b"1", b"2"]


def test_nothing_must_be_taken_for_the_first_word_but_a_word():
    seal = Seal(b"key", listens=True)
    assert not seal.met
    with pytest.raises(ValueError):
        seal.meet(b"0" * 32 + b"\n")
    assert not seal.met
    seal.meet(b"0" * 32)
    assert seal.met


def test_a_line_of_somebody_without_the_key_must_be_refused():
    node, host = pair(other=b"guess")
    with pytest.raises(ValueError):
        node.open(host.close(b"start"))


@pytest.mark.parametrize("harm", ["changed", "repeated", "left out", "sent back", "without proof"])
def test_a_line_that_somebody_has_touched_must_be_refused(harm):
    node, host = pair()
    first, second = host.close(b"first"), host.close(b"second")
    line = {
        "changed": first.replace(b"first", b"other"),
        "repeated": first,
        "left out": second,
        "sent back": node.close(b"first"),
        "without proof": b"first",
    }[harm]
    if harm == "repeated":
        node.open(first)
    with pytest.raises(ValueError):
        node.open(line)


@pytest.mark.parametrize("word", [b"", b"ask 0123", b"0" * 31, b"0" * 33, b"G" * 32])
def test_what_is_no_word_must_not_become_a_part_of_the_key(word):
    node, _ = pair()
    with pytest.raises(ValueError):
        node.meet(word)


def test_a_line_of_another_connection_must_be_refused():
    _, host = pair()
    node, _ = pair()
    with pytest.raises(ValueError):
        node.open(host.close(b"start"))


def test_a_connection_that_was_recorded_must_be_refused_when_it_is_played_again():
    node, host = pair()
    line = host.close(b"start")
    assert node.open(line) == b"start"
    again = Seal(b"key", listens=True)
    again.meet(host.word)
    with pytest.raises(ValueError):
        again.open(line)


SPEAKS = """
import os, socket
assert "NODE_KEY" not in os.environ
for address in (os.environ["NODE_SOCKET"], os.environ["NODE_SOCKETS"] + "/" + socket.gethostname()):
    for said in (b'{"ask": "end"}', b"0" * 64 + b' {"ask": "end"}'):
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(30)
        sock.connect(address)
        word = sock.makefile("rb").readline()
        sock.sendall(word + said + b"\\n")
        assert len(word) == 33 and sock.recv(100) == b"", "it was answered"
"""


@pytest.mark.parametrize("preload", ["", PRELOAD])
def test_a_worker_must_not_be_listened_to_since_it_has_no_key(tmp_path, preload):
    node = Waiting(tmp_path, preload, NODE_SOCKETS=str(tmp_path / "nodes"))
    assert node.run(0, SPEAKS) == 0, node.log(0)
    assert node.run(1, "print('ran')") == 0  # the node has not ended
    node.end()


@pytest.mark.parametrize("word", ["", "0" * 63, "x" * 64, "0" * 66])
def test_a_node_must_not_wait_without_a_key(tmp_path, word):
    env = os.environ | {"NODE_MODE": "wait", "NODE_SOCKET": str(tmp_path / "s"), "NODE_KEY": word}
    done = subprocess.run([sys.executable, NODE], env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "[node] error: NODE_KEY must be 64 hexadecimal digits\n")
    assert not (tmp_path / "s").exists()
