"""The lease of nodes on other machines: whoever is cut off from the orchestrator's machine ends its workers.

A relay answers datagrams; it lives on the orchestrator's machine, but longer than the orchestrator. A node asks it
every few seconds, and ends its workers when it has had no answer for as long as `LEASE`; the orchestrator starts the
next generation elsewhere only after that. So both halves of a network that has come apart never train at once.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
import time
from collections.abc import Callable

from orchestrate.node.loop import Loop

LEASE = 8.0  # seconds
ASKS = 1.0  # seconds between two questions


def answer(key: bytes, question: bytes) -> bytes:
    """What only a relay of the same job says."""
    return hmac.digest(key, b"lease " + question, "sha256")


def relay(key: bytes, port: int) -> None:
    """Answer for ever; nothing that was asked changes anything."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("", port))
        while True:
            with contextlib.suppress(OSError):
                question, address = sock.recvfrom(64)
                sock.sendto(answer(key, question), address)


class Lease:
    """The node's side."""

    def __init__(self, loop: Loop, key: bytes, address: tuple[str, int], over: Callable[[], None]) -> None:
        """Ask the relay at `address` from now on; call `over` whenever the lease has run out."""
        self.loop, self.key, self.address, self.over = loop, key, address, over
        self.answered = time.monotonic()
        self.question = b""
        self.sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.sock.setblocking(False)
        loop.watch(self.sock, self._read)
        self._ask()

    @property
    def held(self) -> bool:
        """Whether the relay has answered lately."""
        return time.monotonic() - self.answered < LEASE

    def end(self) -> None:
        """Ask no more."""
        self.loop.forget(self.sock)
        self.sock.close()

    def _ask(self) -> None:
        if self.sock.fileno() < 0:
            return
        if not self.held:
            self.over()
        self.question = os.urandom(16)
        with contextlib.suppress(OSError):  # no route, say
            self.sock.sendto(self.question, self.address)
        self.loop.after(ASKS, self._ask)

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            if hmac.compare_digest(self.sock.recv(64), answer(self.key, self.question)):
                self.answered = time.monotonic()
