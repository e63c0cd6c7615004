"""Leases of nodes on other machines: a node that is cut off from the orchestrator's machine ends its workers.

A relay on the orchestrator's machine answers datagrams, and outlives the orchestrator. A node asks it every
second, and ends its workers after `LEASE_TIMEOUT` seconds without an answer; the orchestrator starts the next
generation elsewhere only after that. So the two halves of a partitioned network never train at the same time.

If that machine is the first one of a job of Slurm, which has lost it, only its nodes can put the job back into the
queue.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
import subprocess
import threading
from collections.abc import Callable

from orchestrate.node.loop import Loop
from orchestrate.node.messages.protocol import LEASE_TIMEOUT, RENEW_INTERVAL

QUESTION = 16  # bytes
ABANDONED_AFTER = 60.0  # seconds without an answer after which a node of Slurm asks whether it has lost the machine


def answer(key: bytes, question: bytes) -> bytes:
    """The answer to a request, which only a relay of the same job can compute."""
    return hmac.digest(key, b"lease " + question, "sha256")


def bound(port: int = 0) -> socket.socket:
    """Return the socket of a relay at a port, by default a free one; raises OSError."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.bind(("", port))
    return sock


def relay(key: bytes, sock: socket.socket) -> None:
    """Answer requests forever; a request changes no state."""
    while True:
        with contextlib.suppress(OSError):
            question, address = sock.recvfrom(64)
            if len(question) == QUESTION:  # not another relay's answer: both would answer each other forever
                sock.sendto(answer(key, question), address)


def give_back(job: str) -> None:
    """Put a job of Slurm back into the queue if it has lost its first machine, or cancel it if that is disabled.

    A machine that has come back is not part of the job anymore.
    """

    def said(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(words, capture_output=True, text=True, timeout=ABANDONED_AFTER)

    def shown(kind: str, name: str, key: str) -> str:
        words = said("scontrol", "show", kind, "--oneliner", name).stdout.split()
        return next((word.partition("=")[2] for word in words if word.startswith(f"{key}=")), "")

    with contextlib.suppress(OSError, subprocess.SubprocessError):
        host, nodes = shown("job", job, "BatchHost"), shown("job", job, "NodeList")
        if not host or not nodes or nodes == "(null)":
            return
        lost = host not in said("scontrol", "show", "hostnames", nodes).stdout.split()
        lost = lost or "DOWN" in shown("node", host, "State")
        if lost and "disabled" in said("scontrol", "requeue", job).stderr:
            said("scancel", job)


class Lease:
    """The node's side of a lease."""

    def __init__(self, loop: Loop, key: bytes, address: tuple[str, int], over: Callable[[], None]) -> None:
        """Ask the relay at `address` from now on; call `over` whenever the lease has expired."""
        self.loop, self.key, self.address, self.over = loop, key, address, over
        self.answered, self.patience = loop.time(), ABANDONED_AFTER
        self.question = b""
        self.sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.sock.setblocking(False)
        loop.watch(self.sock, self._read)
        self._ask()

    @property
    def held(self) -> bool:
        """Whether the lease is still valid."""
        return self.loop.time() - self.answered < LEASE_TIMEOUT

    def end(self) -> None:
        """Stop asking."""
        self.loop.forget(self.sock)
        self.sock.close()

    def _ask(self) -> None:
        if self.sock.fileno() < 0:
            return
        if not self.held:
            self.over()
            if (job := os.environ.get("SLURM_JOB_ID")) and self.loop.time() - self.answered > self.patience:
                self.patience += ABANDONED_AFTER
                threading.Thread(target=give_back, args=(job,), daemon=True).start()
        self.question = os.urandom(QUESTION)
        with contextlib.suppress(OSError):  # for example, no route
            self.sock.sendto(self.question, self.address)
        self.loop.after(RENEW_INTERVAL, self._ask)

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            if hmac.compare_digest(self.sock.recv(64), answer(self.key, self.question)):
                self.answered, self.patience = self.loop.time(), ABANDONED_AFTER
