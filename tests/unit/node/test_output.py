"""A node's stdout must never block a worker, and must report the lines that a slow reader missed."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from support.repo import ROOT

from orchestrate.node import output
from orchestrate.node.output import Stdout

LINE = b"x" * 999 + b"\n"


@pytest.fixture
def pipe() -> Iterator[tuple[int, Stdout]]:
    """A descriptor to read from, and the node's stdout that writes to it."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    yield reader, Stdout(writer)
    for descriptor in (reader, writer):
        try:
            os.close(descriptor)
        except OSError:  # closed by the test
            continue


def read(reader: int) -> bytes:
    """All bytes that can be read now."""
    found = b""
    while True:
        try:
            chunk = os.read(reader, 1 << 16)
        except BlockingIOError:
            return found
        if not chunk:
            return found
        found += chunk


def test_a_slow_reader_must_be_told_how_many_lines_it_has_missed(pipe, monkeypatch):
    monkeypatch.setattr(output, "MAX_BUFFERED", 100_000)
    reader, out = pipe
    for _ in range(200):
        out.write(LINE * 2)
    found = b""
    while out.flush():
        found += read(reader)
    out.write(b"next\n")
    out.write(b"last\n")
    lines = (found + read(reader)).splitlines(keepends=True)
    kept = len(lines) - 3
    assert lines[:kept] == [LINE] * kept and kept >= 100
    assert lines[kept:] == [
        b"[node] %d lines are missing here: the reader was too slow\n" % (400 - kept),
        b"next\n",
        b"last\n",
    ]


def test_buffered_output_must_arrive_complete_and_in_order(pipe):
    reader, out = pipe
    expected = b"".join(b"%d\n" % number for number in range(50_000))
    out.write(expected)
    assert out.flush()  # more than a pipe holds
    found = b""
    while out.flush():
        found += os.read(reader, 5000)  # so that the pipe has room for only part of the rest
    assert found + read(reader) == expected


def test_a_reader_must_have_time_for_the_rest_when_the_node_ends(pipe, monkeypatch):
    reader, out = pipe
    os.set_blocking(reader, True)
    monkeypatch.setattr(output, "LAST_FLUSH_TIMEOUT", 60.0)
    out.write(LINE * 200)
    found: list[bytes] = []
    reading = threading.Thread(target=lambda: found.extend(iter(lambda: os.read(reader, 1 << 16), b"")))
    reading.start()
    assert not out.flush(last=True)
    os.close(out.descriptor)
    reading.join()
    assert b"".join(found) == LINE * 200


def test_a_node_must_not_wait_forever_for_a_reader_that_does_not_read(pipe, monkeypatch):
    _, out = pipe
    monkeypatch.setattr(output, "LAST_FLUSH_TIMEOUT", 0.05)
    out.write(LINE * 200)
    assert out.flush(last=True)


def test_a_closed_pipe_must_not_be_an_error(pipe):
    reader, out = pipe
    out.write(LINE * 200)
    os.close(reader)
    assert not out.flush()
    out.write(LINE)
    assert not out.flush(last=True)


def test_stdout_that_is_not_a_pipe_must_stay_blocking(tmp_path):
    with (tmp_path / "out").open("wb") as file:
        out = Stdout(file.fileno())
        assert os.get_blocking(file.fileno())
        out.write(LINE * 200)
    assert (tmp_path / "out").read_bytes() == LINE * 200


def test_importing_the_modules_of_a_node_must_keep_stdout_blocking():
    code = "import os, orchestrate.engines.swarm.engine, orchestrate.engines.docker.engine; print(os.get_blocking(1))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout == "True\n", done.stderr
