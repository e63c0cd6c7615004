"""A proxy for the Docker Engine's socket that can inspect and change traffic."""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from typing import Any

ENGINE = "/var/run/docker.sock"


class Proxy:
    """Listens on a Unix socket, and forwards to the engine and back what `passes` returns."""

    def __init__(self, path: Path) -> None:
        """Serve in the background until `server.close()`."""
        self.path = path
        self.server = socket.socket(socket.AF_UNIX)
        self.server.bind(str(path))
        self.server.listen(128)
        threading.Thread(target=self._serve, daemon=True).start()

    def passes(self, chunk: bytes, asks: bool, connection: dict[str, Any]) -> bytes | None:
        """Return the bytes to forward, or None to close the connection.

        `asks` is whether the chunk goes to the engine; `connection` is a dict for the state of this connection.
        """
        return chunk

    def _serve(self) -> None:
        while True:
            try:
                client = self.server.accept()[0]
            except OSError:
                return
            engine = socket.socket(socket.AF_UNIX)
            engine.connect(ENGINE)
            connection: dict[str, Any] = {}
            for source, sink, asks in ((client, engine, True), (engine, client, False)):
                threading.Thread(target=self._pump, args=(source, sink, asks, connection), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, asks: bool, connection: dict[str, Any]) -> None:
        try:
            while chunk := source.recv(1 << 16):
                passed = self.passes(chunk, asks, connection)
                if passed is None:
                    break
                sink.sendall(passed)
        except OSError:
            pass
        for end in (source, sink):
            end.close()
