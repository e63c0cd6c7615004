"""The last lines of a worker whose node is lost, from the copy of its output that Docker keeps."""

from __future__ import annotations

from orchestrate.record.logs import MARK

OVERLAP = 256  # bytes at the end of a log by which to find its place in the node's stdout


def rescued(here: bytes, copy: bytes, rank: int) -> bytes:
    """Return the missing end of a worker's log, from its node's stdout, whose lines begin with the rank.

    If the two do not overlap, return only a line break, so that the mark of the next generation begins a new line: a
    node's stdout is a copy that may have gaps.
    """
    tag = f"[rank {rank}] ".encode()
    text = b"\n".join(line.removeprefix(tag) for line in copy.split(b"\n") if line.startswith(tag))
    text += b"\n" * copy.endswith(b"\n")
    known = here.rpartition(b"\n" + MARK)[2].partition(b"\n")[2] if MARK in here else here
    end = known[-OVERLAP:]
    at = text.rfind(end) if end else -1
    missing = text[at + len(end) :] if at >= 0 else b""
    return missing + b"\n" * (not (here + missing).endswith(b"\n") and bool(here + missing))
