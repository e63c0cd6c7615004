"""Accept connections to a node: a limited number at a time, without ending the node if that fails."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Callable
from typing import Any

from orchestrate.node.loop import Loop
from orchestrate.node.messages.auth import Signer
from orchestrate.node.messages.channel import Channel

MAX_CLIENTS = 64  # connections at a time
BACKLOG = 128  # connections that may wait to be accepted
PROOF_TIMEOUT = 10.0  # seconds within which a client must prove that it has the key
ACCEPT_INTERVAL = 0.2  # seconds until the next attempt, if there was no descriptor or memory for a connection
FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def serve(
    loop: Loop,
    server: socket.socket,
    take: Callable[[socket.socket, Any], None],
    make_room: Callable[[], bool] = lambda: False,
) -> None:
    """Call `take` with each connection to `server` and the address of its peer.

    If no descriptor is left for a connection, it waits until `make_room` has closed another one, or for some time.
    """

    def accept() -> None:
        try:
            sock, address = server.accept()
        except OSError as error:
            if error.errno in FULL and not make_room():
                loop.forget(server)
                loop.after(ACCEPT_INTERVAL, lambda: loop.watch(server, accept) if server.fileno() >= 0 else None)
            return
        take(sock, address)

    server.setblocking(False)
    loop.watch(server, accept)


class Listener:
    """Accepts clients, `MAX_CLIENTS` at a time; a new client replaces the oldest one without a request."""

    def __init__(self, loop: Loop, server: socket.socket, receive: Callable[[Channel, Any], None], key: bytes) -> None:
        """Call `receive` as a channel does; clients must prove within `PROOF_TIMEOUT` seconds that they have `key`."""
        self.loop, self.server, self.receive, self.key = loop, server, receive, key
        self.channels: list[Channel] = []  # the oldest first
        self.sweeping = False
        serve(loop, server, self._take, self._make_room)

    def close(self) -> None:
        """Accept no more connections."""
        self.loop.forget(self.server)
        self.server.close()

    def drop(self, kept: Channel) -> None:
        """Close all connections but one, including those not yet accepted; their pending requests are dropped."""
        with contextlib.suppress(OSError):
            for _ in range(2 * BACKLOG):
                self.server.accept()[0].close()
        for channel in self.channels:
            if channel is not kept:
                channel.end()

    def _take(self, sock: socket.socket, _: Any) -> None:
        self.channels = [channel for channel in self.channels if channel.open]
        if len(self.channels) >= MAX_CLIENTS and not self._make_room():
            return sock.close()
        signer = Signer(self.key, listens=True)
        channel = Channel(self.loop, sock, lambda message: self.receive(channel, message), signer)
        self.channels.append(channel)
        if not self.sweeping:
            self._sweep()

    def _silent(self) -> list[Channel]:
        return [channel for channel in self.channels if channel.open and not channel.heard]

    def _make_room(self) -> bool:
        """Close the oldest connection without a request; False if there is none."""
        silent = self._silent()
        for channel in silent[:1]:
            channel.end()
        return bool(silent)

    def _sweep(self) -> None:
        """Close connections without proof of the key in time; check again while there may be more."""
        for channel in self._silent():
            if self.loop.time() - channel.since >= PROOF_TIMEOUT:
                channel.end()
        self.sweeping = bool(self._silent())
        if self.sweeping:
            self.loop.after(PROOF_TIMEOUT / 10, self._sweep)
