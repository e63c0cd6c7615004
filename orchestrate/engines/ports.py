"""On which port rank 0 listens."""

from __future__ import annotations

import contextlib
import random
import socket

from orchestrate.errors import EngineError
from orchestrate.node.ranks import MASTER_PORT


def free_port() -> int:
    """A free port of the loopback interface, below the kernel's ephemeral ports."""
    for port in random.sample(range(20000, 30000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise EngineError("no free port from 20000 to 30000 on the loopback interface", "see what listens there: ss -ltn")


def port(network: str, generation: int) -> int:
    """A port for rank 0 of a generation; `network` is that of a `Placement`.

    In a network of its own only the job's last generation could still hold one: torch's default comes first, and each
    generation gets another. Elsewhere it is one that is free here, and so most likely on other hosts.
    """
    return MASTER_PORT + generation % 1000 if network == "bridge" else free_port()
