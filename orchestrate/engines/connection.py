"""A connection to a node."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from orchestrate.engines.base import never
from orchestrate.errors import EngineError
from orchestrate.node.messages import protocol
from orchestrate.node.messages.auth import Signer
from orchestrate.node.messages.protocol import MAX_GREETING

T = TypeVar("T")
ANSWER_TIMEOUT = 10.0  # seconds to wait for a node's answer
LARGE = 1 << 20  # bytes of a report that takes much memory: seven times its size, once it is parsed
POLL_INTERVAL = 0.5  # seconds between two questions whether an answer is still wanted


def one_at_a_time(lock: threading.RLock, held: contextlib.ExitStack) -> Callable[[int], None]:
    """Return an `admit` that takes a lock before a large report is parsed, and keeps it until `held` is closed."""

    def admit(size: int) -> None:
        if size > LARGE:
            held.enter_context(lock)

    return admit


class NodeConnection:
    """A connection to a node: JSON lines in both directions, each with an HMAC."""

    def __init__(self, sock: socket.socket, key: bytes, decode: Callable[[bytes], bytes] = bytes) -> None:
        """`key` is the job's key; `decode` unwraps the frames in which an engine sends data."""
        self.sock, self.decode, self.partial = sock, decode, bytearray()
        self.signer = Signer(key, listens=False)
        sock.settimeout(ANSWER_TIMEOUT)

    def greet(self, patience: float) -> bool:
        """Exchange nonces and prove the key; return False if the node does not respond within `patience` seconds."""
        deadline = time.monotonic() + patience
        try:
            self.signer.meet(self._handshake_line(deadline))
            self.sock.settimeout(ANSWER_TIMEOUT)
            self.sock.sendall(self.signer.nonce + b"\n" + self.signer.sign(b"") + b"\n")
            if self.signer.verify(self._handshake_line(deadline)):
                raise ValueError("no proof")
            self.sock.settimeout(ANSWER_TIMEOUT)
        except (OSError, ValueError):
            self.close()
            return False
        return True

    def _handshake_line(self, deadline: float) -> bytes:
        """Read the next line, which must be short and arrive before the deadline; raises OSError."""
        while b"\n" not in self.partial:
            self.sock.settimeout(max(0.001, deadline - time.monotonic()))
            if len(self.partial) > MAX_GREETING or not (chunk := self.sock.recv(1 << 16)):
                raise OSError("line too long, or connection closed")
            self.partial += self.decode(chunk)
        line, _, self.partial = self.partial.partition(b"\n")
        return bytes(line)

    def send(self, request: protocol.Request) -> bool:
        """Send a request to the node; return False if the connection is closed."""
        try:
            self.sock.sendall(self.signer.sign(protocol.encode(request)) + b"\n")
        except OSError:
            return False
        return True

    def receive(self, admit: Callable[[int], None] = lambda size: None, long: str = "") -> list[protocol.Report] | None:
        """Read reports from the node once the socket is readable; None if the connection is closed, or one is too long.

        `admit` is called with the size of each in bytes, before it is parsed; only reports of the kind `long` may have
        more than 1 MiB.
        """
        chunk = b""
        with contextlib.suppress(OSError):
            chunk = self.sock.recv(1 << 16)
        if not chunk:
            return None
        chunk, lines = self.decode(chunk), list[bytes]()
        self.partial += chunk
        if b"\n" in chunk:  # otherwise, a node that sends single bytes would make us search all of them again
            *lines, rest = bytes(self.partial).split(b"\n")
            self.partial = bytearray(rest)
        if len(self.partial) > (protocol.MAX_REPORT if long else protocol.MAX_SHORT_REPORT):
            return None
        reports = list[protocol.Report]()
        try:
            for line in map(self.signer.verify, lines):
                if len(line) > protocol.MAX_SHORT_REPORT and not line.startswith(f'{{"say": "{long}", '.encode()):
                    return None
                admit(len(line))
                reports.append(protocol.report(line))
            return reports
        except ValueError:  # for example an error message of Docker, if a container ends while an exec starts
            return None

    def interrupt(self) -> None:
        """Shut down the connection, which wakes threads that read from it; `close` is still needed."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection, even if another process holds its socket."""
        self.interrupt()
        self.sock.close()

    def converse(
        self,
        request: protocol.Request,
        answer: type[T],
        patience: float = ANSWER_TIMEOUT,
        stopped: Callable[[], bool] = never,
        admit: Callable[[int], None] = lambda size: None,
    ) -> T:
        """Send a request and wait for a report of type `answer`, on a connection that has no other use.

        Raises ConnectionError if the connection closes or no answer arrives within `patience` seconds, whatever
        else the node sends meanwhile, and soon after `stopped()`; EngineError if the node reports an error.
        `admit` is called with the size of each report in bytes, before it is parsed.
        """
        deadline = time.monotonic() + patience
        self.sock.settimeout(ANSWER_TIMEOUT)
        sent, readable = self.send(request), select.poll()
        readable.register(self.sock, select.POLLIN)
        while sent and not stopped() and (left := deadline - time.monotonic()) > 0:
            if not readable.poll(1000 * min(left, POLL_INTERVAL)):
                continue
            reports = self.receive(admit, answer.__name__.lower())
            if reports is None:
                break
            for report in reports:
                if isinstance(report, protocol.Refusal | protocol.Failed):
                    raise EngineError(f"node error: {protocol.reason(report.error)}")
                if isinstance(report, answer):
                    return report
        raise ConnectionError("the node did not respond in time, or closed the connection")
