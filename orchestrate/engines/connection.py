"""A connection to a node. `node/wait.py` describes the messages."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable
from typing import Any

from orchestrate.engines import messages
from orchestrate.errors import EngineError
from orchestrate.node.loop import LONGEST_GREETING
from orchestrate.node.sealed import Seal

ANSWERS = 10.0  # seconds that a node may take to answer


class NodeConnection:
    """A connection to a node: JSON lines in both directions, each with an HMAC."""

    def __init__(self, sock: socket.socket, key: bytes, decode: Callable[[bytes], bytes] = bytes) -> None:
        """`key` is that of the job; `decode` removes the frames in which an engine sends data."""
        self.sock, self.decode, self.partial = sock, decode, b""
        self.seal = Seal(key, listens=False)
        sock.settimeout(ANSWERS)

    def greet(self, patience: float) -> bool:
        """Exchange nonces and proofs of the key; False if the node does not answer within `patience` seconds."""
        deadline = time.monotonic() + patience
        try:
            self.seal.meet(self._greeting(deadline))
            self.sock.settimeout(ANSWERS)
            self.sock.sendall(self.seal.word + b"\n" + self.seal.close(b"") + b"\n")
            if self.seal.open(self._greeting(deadline)):
                raise ValueError("no proof")
            self.sock.settimeout(ANSWERS)
        except (OSError, ValueError):
            self.close()
            return False
        return True

    def _greeting(self, deadline: float) -> bytes:
        """The next line, which must be short and arrive in time; raises OSError."""
        while b"\n" not in self.partial:
            self.sock.settimeout(max(0.001, deadline - time.monotonic()))
            if len(self.partial) > LONGEST_GREETING or not (chunk := self.sock.recv(1 << 16)):
                raise OSError("no such line, or the connection has ended")
            self.partial += self.decode(chunk)
        line, _, self.partial = self.partial.partition(b"\n")
        return line

    def send(self, ask: str, **facts: Any) -> bool:
        """Send a request to the node; False if the connection has ended."""
        text = json.dumps({"ask": ask, **facts}).encode()
        try:
            self.sock.sendall(self.seal.close(text) + b"\n")
        except OSError:
            return False
        return True

    def receive(self) -> list[dict[str, Any]] | None:
        """The messages of the node, once the socket is readable; None at the end of the connection."""
        chunk = b""
        with contextlib.suppress(OSError):
            chunk = self.sock.recv(1 << 16)
        if not chunk:
            return None
        *lines, self.partial = (self.partial + self.decode(chunk)).split(b"\n")
        if len(self.partial) > messages.LONGEST:
            return None
        try:
            return [messages.read(self.seal.open(line)) for line in lines]
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

    def converse(self, ask: str, patience: float = ANSWERS, **facts: Any) -> dict[str, Any]:
        """Send a request, and wait for the answer; for a connection that is used for nothing else.

        Raises ConnectionError if the connection ends or the answer takes more than `patience` seconds, whatever else
        the node sends meanwhile; EngineError with an error of the node.
        """
        deadline = time.monotonic() + patience
        self.sock.settimeout(patience)
        sent = self.send(ask, **facts)
        while sent and (left := deadline - time.monotonic()) > 0:
            self.sock.settimeout(left)
            heard = self.receive()
            if heard is None:
                break
            for message in heard:
                if message["say"] == "refused" or (message["say"] == ask and "error" in message):
                    raise EngineError(f"a node says: {messages.reason(message)}")
                if message["say"] == ask:
                    return message
        raise ConnectionError("the node has not answered in time, or the connection has ended")
