"""What comes over a connection to a node must arrive whole, however it is cut, and nonsense must end it."""

import json
import os
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest
from waiting import PIPE

from orchestrate.engines.daemon import Frames
from orchestrate.engines.links import Link, Linked
from orchestrate.engines.ports import free_port

MESSAGES = [{"say": "status", "running": {}}, {"say": "ended", "rank": 3, "code": 0, "text": "ä" * 300}]
SAID = {"say": "ended", "generation": 0, "sign": "", "asked": False}
LINES = b"".join(json.dumps(message).encode() + b"\n" for message in MESSAGES)


@pytest.fixture
def ends():
    here, there = socket.socketpair()
    yield Link(here), there
    here.close()
    there.close()


@pytest.mark.parametrize("size", [1, 7, 100, 10_000])
def test_messages_must_be_put_together_from_pieces(ends, size):
    link, there = ends
    heard = []
    for start in range(0, len(LINES), size):
        there.sendall(LINES[start : start + size])
        heard += link.receive()
    assert heard == MESSAGES


def test_what_is_no_message_must_end_the_connection(ends):
    link, there = ends
    there.sendall(b"OCI runtime exec failed: exec failed: container not running\n")
    assert link.receive() is None


def test_a_connection_that_has_ended_must_take_no_request(ends):
    link, there = ends
    there.close()
    assert link.receive() is None
    assert not link.send("status")


def linked(generation: int, ranks: int) -> Linked:
    engine = Linked()
    engine.generation, engine.running = generation, {rank: f"node-{rank}" for rank in range(ranks)}
    return engine


def test_ends_must_be_told_in_their_own_order_whatever_is_heard_first():
    engine = linked(0, 3)
    for rank, code, at in ((2, 1, 12.5), (0, 1, 12.0), (1, 139, 11.5)):
        engine._heard(f"node-{rank}", {**SAID, "rank": rank, "code": code, "at": at})
    assert [(exit.rank, exit.code) for exit in engine.wait(0)] == [(1, 139), (0, 1), (2, 1)]


@pytest.mark.parametrize(("generation", "known"), [(0, False), (1, True), (2, False)])
def test_only_what_a_node_knows_of_this_generation_must_count(generation, known):
    engine = linked(1, 2)
    state = {"generation": generation, "codes": {"0": 3}, "signs": {"0": ""}, "running": {"1": {"pid": 7}}}
    assert [engine._know(rank, state) for rank in (0, 1)] == [known, known]
    assert [exit.code for exit in engine.wait(0)] == [3] * known
    assert engine.pids == {1: 7} if known else not engine.pids


def test_workers_that_have_not_started_must_end_at_once_when_the_job_is_stopped():
    engine = linked(0, 3)
    engine.queued = [SimpleNamespace(rank=rank) for rank in (1, 2)]
    engine.stop(kill=False)
    assert [(exit.rank, exit.code, exit.asked) for exit in engine.wait(0)] == [(1, 143, True), (2, 143, True)]
    assert engine.running == {0: "node-0"} and not engine.queued


def test_a_node_that_is_not_there_must_be_tried_no_longer_than_was_asked_for():
    command = [sys.executable, "-I", "-S", PIPE, "127.0.0.1", str(free_port()), "0.1"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=30)
    assert done.returncode == 1 and b"refused" in done.stderr


@pytest.mark.parametrize("over", ["tcp", "unix"])
@pytest.mark.parametrize("first", ["node", "orchestrator"])
def test_what_is_said_must_be_passed_on_both_ways_until_one_side_ends(tmp_path, over, first):
    family, address = (socket.AF_INET, ("127.0.0.1", 0)) if over == "tcp" else (socket.AF_UNIX, str(tmp_path / "s"))
    with socket.socket(family) as server:
        server.bind(address)
        server.listen()
        server.settimeout(60)
        words = ["127.0.0.1", str(server.getsockname()[1]), "60"] if over == "tcp" else []
        env = os.environ | {"NODE_SOCKET": str(tmp_path / "s")}
        with subprocess.Popen(
            [sys.executable, "-I", "-S", PIPE, *words], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as process:
            node, _ = server.accept()
            with node, node.makefile("rb") as heard:
                text = os.urandom(150_000)  # more than one read takes
                process.stdin.write(text)
                process.stdin.flush()
                assert heard.read(len(text)) == text
                node.sendall(text)
                assert process.stdout.read(len(text)) == text
                if first == "orchestrator":
                    process.stdin.close()
                    assert heard.read() == b""
            assert process.stdout.read() == b""
            assert process.wait(timeout=60) == 0


@pytest.mark.parametrize("size", [1, 3, 8, 50, 10_000])
def test_the_engines_frames_must_be_taken_off_and_stderr_left_out(size):
    def frame(stream: int, content: bytes) -> bytes:
        return bytes([stream, 0, 0, 0]) + len(content).to_bytes(4, "big") + content

    wire = frame(1, LINES[:10]) + frame(2, b"a warning\n") + frame(1, b"") + frame(1, LINES[10:])
    frames = Frames(None)
    assert b"".join(frames.stdout(wire[i : i + size]) for i in range(0, len(wire), size)) == LINES
