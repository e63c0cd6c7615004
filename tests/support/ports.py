"""Ports for what a test itself starts."""

import itertools
import os
import socket

WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
PER_WORKER = 500
_next = itertools.count(os.getpid())  # two runs of the tests at a time begin at different ports


def free_port() -> int:
    """Return a free port that no other test chooses, nor a job, which uses 20000 and above.

    Unlike a port of `orchestrate.engines.ports`, which another process can take before it is used.
    """
    for number in itertools.islice(_next, PER_WORKER):
        port = 10000 + WORKER % 20 * PER_WORKER + number % PER_WORKER
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise AssertionError("no free port")
