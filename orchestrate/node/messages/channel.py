"""Messages over a socket, one per line; see protocol.py."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable
from typing import Any

from orchestrate.node.loop import Loop
from orchestrate.node.messages.auth import Signer
from orchestrate.node.messages.checks import Refused
from orchestrate.node.messages.protocol import MAX_GREETING, SEND_TIMEOUT, Refusal, encode, parsed, wait_at_most

MAX_MESSAGE = 1 << 20  # bytes


class Channel:
    """Messages over a socket, one per line; see protocol.py."""

    def __init__(
        self, loop: Loop, sock: socket.socket, receive: Callable[[Any], None], signer: Signer | None = None
    ) -> None:
        """Call `receive` with the object in each line, and with None at the end of the connection.

        With a `signer`, each line needs a proof. If `receive` raises Refused, the peer gets the reason.
        """
        self.loop, self.sock, self.receive, self.signer, self.buffer = loop, sock, receive, signer, bytearray()
        self.heard = False  # whether the peer has sent a message; if signed, whether it has proved that it has the key
        self.since = loop.time()
        loop.watch(sock, self._read)
        wait_at_most(sock, SEND_TIMEOUT)
        if signer:
            self._write(signer.nonce)

    @property
    def open(self) -> bool:
        """Whether the connection is open."""
        return self.sock.fileno() >= 0

    def send(self, message: Any) -> None:
        """Send one message; a closed connection is noticed when reading."""
        text = encode(message)
        self._write(self.signer.sign(text) if self.signer else text)

    def refuse(self, why: str) -> None:
        """Send a peer the reason for a refusal; a peer without the key gets no answer."""
        if self.heard or not self.signer:
            self.send(Refusal(why))

    def _write(self, line: bytes) -> None:
        with contextlib.suppress(OSError):
            try:
                self.sock.sendall(line + b"\n")
            except OSError:  # a part of a line may have been sent
                self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection; nothing more is received."""
        if self.open:
            self.loop.forget(self.sock)
            self.sock.close()

    def end(self) -> None:
        """Close the connection, as if the peer had."""
        if self.open:
            self.close()
            self.receive(None)

    def _read(self) -> None:
        try:
            chunk = self.sock.recv(1 << 16, socket.MSG_DONTWAIT)
        except OSError:
            chunk = b""
        self.buffer += chunk
        lines = []
        if b"\n" in chunk:
            *lines, rest = bytes(self.buffer).split(b"\n")
            self.buffer = bytearray(rest)
        if not chunk or not all(map(self._take, lines)):
            return self.end()
        longest = MAX_GREETING if self.signer and not self.signer.ready else MAX_MESSAGE
        if len(self.buffer) > longest:
            self.refuse(f"the message is longer than {longest} bytes")
            self.end()

    def _take(self, line: bytes) -> bool:
        """Handle one line; False if the peer does not have the key or uses another protocol."""
        try:
            if self.signer and not self.signer.ready:
                self.signer.meet(line)
                return True
            text = self.signer.verify(line) if self.signer else line
        except ValueError:
            return False
        if self.signer and not self.heard:
            self._write(self.signer.sign(b""))
        self.heard = True
        if self.signer and not text:
            return True
        try:
            message = parsed(text)
        except Refused as error:
            self.refuse(str(error))
            return False
        try:
            self.receive(message)
        except Refused as error:
            self.refuse(str(error))
        return True


def connect(family: int, address: Any, timeout: float) -> socket.socket:
    """Connect to `address`, retrying for `timeout` seconds while nothing listens there; then raises OSError."""
    deadline = time.monotonic() + timeout
    while True:
        connection = socket.socket(family)
        try:
            connection.connect(address)
            return connection
        except OSError:
            connection.close()
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
