"""Unix sockets of nodes on this machine.

Local processes listen in a private folder of this user, with a subfolder for each job. Containers listen in the run
directory, so that nodes write to no other disk than the job folder's.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import socket
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path

from orchestrate.engines.base import never
from orchestrate.engines.connection import ANSWER_TIMEOUT, NodeConnection
from orchestrate.errors import EngineError
from orchestrate.files.folder import remove, renew
from orchestrate.host import records
from orchestrate.node.trees import FOLDER, clear


def possible(folder: Path) -> bool:
    """Whether the file system of a folder supports Unix sockets."""
    name = f".{secrets.token_hex(8)}"
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        stack.callback(os.close, descriptor)
        probe = stack.enter_context(socket.socket(socket.AF_UNIX))
        probe.bind(f"/proc/self/fd/{descriptor}/{name}")  # the path itself may exceed the limit for sockets
        os.unlink(name, dir_fd=descriptor)
        return True
    return False


def share(folder: Path, user: str) -> None:
    """Create the folder of a job's sockets, writable by nodes; `user` is UID:GID. Raises EngineError."""
    try:
        with records.pinned(folder.parent) as run:
            with contextlib.suppress(FileExistsError):
                (run / folder.name).mkdir(mode=0o700)
            descriptor = os.open(run / folder.name, FOLDER)
            try:
                if os.geteuid() == 0:
                    os.fchown(descriptor, *map(int, user.split(":")))
            finally:
                os.close(descriptor)
    except OSError as error:
        raise EngineError(f"cannot create the folder for node sockets: {error}") from None


def unshare(folder: Path) -> None:
    """Remove the folder of a job's sockets, which may contain anything; raises EngineError."""
    try:
        with contextlib.suppress(FileNotFoundError), records.pinned(folder.parent) as run:
            remove(run / folder.name)
    except OSError as error:
        raise EngineError(f"cannot remove {folder}: {error.strerror}") from None


def tidy(folder: Path, names: set[str]) -> None:
    """Remove, as far as possible, what a job on a cluster created next to the sockets of its nodes."""
    with contextlib.suppress(OSError), records.pinned(folder.parent) as run:
        clear(str(run / folder.name), names)
        renew(run / folder.name, 0o700)


def connect(path: Path, key: bytes, comes: Callable[[], bool] = never) -> NodeConnection:
    """Connect to a node's Unix socket; if it is missing, wait while `comes()`, which is called once a second.

    Raises OSError if nothing listens there, or the listener does not have the key. Links are not followed: a node could
    have replaced its socket by a link to another one.
    """
    asked = -math.inf
    while True:
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(ANSWER_TIMEOUT)  # the listener may never accept
        try:
            _dial(sock, path)
            connection = NodeConnection(sock, key)
            if connection.greet(ANSWER_TIMEOUT):
                return connection
            raise ConnectionRefusedError(f"the listener at {path} is not the node")
        except OSError as error:
            sock.close()
            if not isinstance(error, FileNotFoundError):
                raise
            if time.monotonic() - asked > 1:
                if not comes():
                    raise
                asked = time.monotonic()
            time.sleep(0.01)


def _dial(sock: socket.socket, path: Path) -> None:
    if sys.platform != "linux":
        return sock.connect(str(path))
    folder = os.open(path.parent, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.open(path.name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    finally:
        os.close(folder)
    try:
        if not stat.S_ISSOCK(os.fstat(found).st_mode):
            raise ConnectionRefusedError(f"{path} is not a socket")
        sock.connect(f"/proc/self/fd/{found}")  # the path itself may exceed the limit for sockets
    finally:
        os.close(found)
