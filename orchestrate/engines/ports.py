"""Ports of this machine."""

from __future__ import annotations

import contextlib
import random
import socket

from orchestrate.errors import EngineError


def free_port() -> int:
    """A free port of the loopback interface, below the kernel's ephemeral ports."""
    for port in random.sample(range(20000, 30000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise EngineError("no free port from 20000 to 30000 on the loopback interface", "see what listens there: ss -ltn")
