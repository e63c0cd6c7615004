"""Both ends of a connection to a node, whose lines are signed with the job's key."""

import contextlib
import json
import os
import socket
import threading
from pathlib import Path
from typing import Any

from orchestrate.engines.connection import NodeConnection
from orchestrate.node.messages.auth import Signer

KEY = bytes(range(32))


class End:
    """One end; `listens` marks the node's end, which greets first."""

    def __init__(self, sock: socket.socket, listens: bool = False, greets: bool = True, key: bytes = KEY) -> None:
        self.sock, self.signer, self.partial = sock, Signer(key, listens), b""
        sock.settimeout(30)
        if listens and greets:
            self._send(self.signer.nonce)

    def meet(self) -> None:
        """Exchange the handshake that starts a connection."""
        if not self.signer.ready:
            self.signer.meet(self._line())
            if not self.signer.listens:
                self._send(self.signer.nonce + b"\n" + self.signer.sign(b""))
            assert self.signer.verify(self._line()) == b""
            if self.signer.listens:
                self._send(self.signer.sign(b""))

    def send(self, text: bytes) -> None:
        self.meet()
        self._send(self.signer.sign(text.rstrip(b"\n")))

    def ask(self, ask: str, **facts: object) -> None:
        self.send(json.dumps({"ask": ask, **facts}).encode())

    def hear(self) -> Any:
        """The next message; None at the end of the connection."""
        self.meet()
        line = self._line()
        return json.loads(self.signer.verify(line)) if line else None

    def heard(self) -> list[dict]:
        """All messages that have arrived."""
        self.meet()
        self.sock.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while chunk := self.sock.recv(1 << 16):
                self.partial += chunk
        self.sock.settimeout(30)
        *lines, self.partial = self.partial.split(b"\n")
        return [json.loads(self.signer.verify(line)) for line in lines]

    def _send(self, line: bytes) -> None:
        self.sock.sendall(line + b"\n")

    def _line(self) -> bytes:
        while b"\n" not in self.partial:
            if not (chunk := self.sock.recv(1 << 16)):
                return b""
            self.partial += chunk
        line, _, self.partial = self.partial.partition(b"\n")
        return line


def connected() -> tuple[NodeConnection, End]:
    """An orchestrator's connection to a node, and the node's end, which the test controls."""
    here, there = socket.socketpair()
    node, link = End(there, listens=True), NodeConnection(here, KEY)
    greeted(link, node)
    return link, node


def greeted(link: NodeConnection, node: End) -> None:
    """Complete the handshake between both ends of a connection."""
    meets = threading.Thread(target=node.meet)
    meets.start()
    assert link.greet(30)
    meets.join()


# --- sockets in folders


def listening(folder: Path, name: str) -> socket.socket:
    """Listen on a Unix socket in a folder, whose path may exceed the limit of socket addresses."""
    server, descriptor = socket.socket(socket.AF_UNIX), os.open(folder, os.O_PATH)
    server.bind(f"/proc/self/fd/{descriptor}/{name}")
    os.close(descriptor)
    server.listen()
    return server
