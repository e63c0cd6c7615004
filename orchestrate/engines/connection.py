"""A connection to a node."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable
from typing import TypeVar

from orchestrate.errors import EngineError
from orchestrate.node import protocol
from orchestrate.node.auth import Signer
from orchestrate.node.loop import MAX_GREETING

T = TypeVar("T")
ANSWER_TIMEOUT = 10.0  # seconds that a node may take to answer


class NodeConnection:
    """A connection to a node: JSON lines in both directions, each with an HMAC."""

    def __init__(self, sock: socket.socket, key: bytes, decode: Callable[[bytes], bytes] = bytes) -> None:
        """`key` is that of the job; `decode` removes the frames in which an engine sends data."""
        self.sock, self.decode, self.partial = sock, decode, b""
        self.signer = Signer(key, listens=False)
        sock.settimeout(ANSWER_TIMEOUT)

    def greet(self, patience: float) -> bool:
        """Exchange nonces and proofs of the key; False if the node does not answer within `patience` seconds."""
        deadline = time.monotonic() + patience
        try:
            self.signer.meet(self._greeting(deadline))
            self.sock.settimeout(ANSWER_TIMEOUT)
            self.sock.sendall(self.signer.nonce + b"\n" + self.signer.sign(b"") + b"\n")
            if self.signer.verify(self._greeting(deadline)):
                raise ValueError("no proof")
            self.sock.settimeout(ANSWER_TIMEOUT)
        except (OSError, ValueError):
            self.close()
            return False
        return True

    def _greeting(self, deadline: float) -> bytes:
        """The next line, which must be short and arrive in time; raises OSError."""
        while b"\n" not in self.partial:
            self.sock.settimeout(max(0.001, deadline - time.monotonic()))
            if len(self.partial) > MAX_GREETING or not (chunk := self.sock.recv(1 << 16)):
                raise OSError("no such line, or the connection has ended")
            self.partial += self.decode(chunk)
        line, _, self.partial = self.partial.partition(b"\n")
        return line

    def send(self, request: protocol.Request) -> bool:
        """Send a request to the node; False if the connection has ended."""
        try:
            self.sock.sendall(self.signer.sign(protocol.encode(request)) + b"\n")
        except OSError:
            return False
        return True

    def receive(self) -> list[protocol.Report] | None:
        """The reports of the node, once the socket is readable; None at the end of the connection."""
        chunk = b""
        with contextlib.suppress(OSError):
            chunk = self.sock.recv(1 << 16)
        if not chunk:
            return None
        *lines, self.partial = (self.partial + self.decode(chunk)).split(b"\n")
        if len(self.partial) > protocol.MAX_REPORT:
            return None
        try:
            return [protocol.report(self.signer.verify(line)) for line in lines]
        except ValueError:  # for example Docker's error text, if a container ends while an exec starts
            return None

    def interrupt(self) -> None:
        """End the connection, also for a thread that waits for an answer; it must still be closed."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection, even if another process holds its socket."""
        self.interrupt()
        self.sock.close()

    def converse(self, request: protocol.Request, answer: type[T], patience: float = ANSWER_TIMEOUT) -> T:
        """Send a request, and wait for a report of the type `answer`; for a connection that is used for nothing else.

        Raises ConnectionError if the connection ends or the answer takes more than `patience` seconds, whatever else
        the node sends meanwhile; EngineError with an error of the node.
        """
        deadline = time.monotonic() + patience
        self.sock.settimeout(patience)
        sent = self.send(request)
        while sent and (left := deadline - time.monotonic()) > 0:
            self.sock.settimeout(left)
            heard = self.receive()
            if heard is None:
                break
            for report in heard:
                if isinstance(report, protocol.Refusal | protocol.Failed):
                    raise EngineError(f"a node says: {protocol.reason(report.error)}")
                if isinstance(report, answer):
                    return report
        raise ConnectionError("the node has not answered in time, or the connection has ended")
