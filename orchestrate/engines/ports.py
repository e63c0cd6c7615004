"""Choice of rank 0's port."""

from __future__ import annotations

import contextlib
import random
import socket

from orchestrate.errors import EngineError
from orchestrate.node.ranks import MASTER_PORT, PORTS


def free_port() -> int:
    """Return a free port on the loopback interface, below the kernel's ephemeral ports."""
    for port in random.sample(range(20000, 30000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise EngineError("no free port between 20000 and 30000 on the loopback interface", "list listening ports: ss -ltn")


def port(network: str, generation: int) -> int:
    """Return a port for rank 0 of a generation; `network` is the one of a `Placement`.

    On a job's own network only its previous generation can still use a port, so each generation gets the next one,
    starting at torch's default. Elsewhere it is a port that is free here, and so most likely on other hosts.
    """
    return MASTER_PORT + generation % PORTS if network == "bridge" else free_port()
