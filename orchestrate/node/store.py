"""torch's store of a generation, in a process of the master's node, as torchrun's agent hosts it.

In a worker, it would end with that worker, and take others with it that still need it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path

from orchestrate.node.messages.checks import integer
from orchestrate.node.output import print_message
from orchestrate.node.ranks import MASTER_PORT, PORTS, Env
from orchestrate.node.traffic import connections
from orchestrate.node.warm import Forked, Zygote, die_with_parent

VARIABLE = "TORCHELASTIC_USE_AGENT_STORE"  # torch's name: with `True`, rank 0 expects the store, like all others
# Read now: on a Swarm, jobs can write to this folder.
PROGRAM = Path(__file__).with_name("programs").joinpath("tcpstore.py").read_text()
BACKLOG = 1024  # connections that wait until the process accepts them
OWN = 1  # connections of the process to itself


class Store:
    """A port at which workers find the store; the first connection starts the process that hosts it.

    Connections wait in the kernel until then, so no worker has to try again, and a job that does not use the store has
    no such process.
    """

    def __init__(self, env: Env) -> None:
        """Listen where a worker with this environment expects the store; raises OSError, and Refused without a port."""
        self.port = integer(env, "MASTER_PORT", default=MASTER_PORT, least=1, most=65535)
        self.process: Forked | subprocess.Popen[bytes] | None = None
        local = env.get("MASTER_ADDR") in ("127.0.0.1", "localhost")
        try:
            self.server = _listening("127.0.0.1" if local else "", self.port)
        except OSError as error:
            raise OSError(error.errno, os.strerror(error.errno or 0), f"port {self.port}") from None

    def host(self, zygote: Zygote | None, failed: Callable[[str], None]) -> None:
        """Start the process, from `zygote` if it can fork; if not, `failed` gets why: its answer may come later."""
        command, env = ["-c", PROGRAM, str(self.port)], {**os.environ, "PYTHONFAULTHANDLER": "1"}
        with self.server:
            if zygote and zygote.ready:
                try:
                    self.process = zygote.fork(command, env, "/", self.server.fileno(), sys.stderr.fileno())
                    return
                except OSError as error:
                    failed(str(error))
            try:
                self.process = subprocess.Popen(
                    [sys.executable, "-u", *command],
                    env=env,
                    cwd="/",
                    stdin=self.server.fileno(),
                    stdout=sys.stderr,
                    start_new_session=True,
                    preexec_fn=die_with_parent,
                )
            except OSError as error:
                print_message(f"cannot start the process that hosts torch's store: {error}")

    def lost(self) -> bool:
        """Whether the process has ended before the store was closed."""
        return self.process is not None and self.process.poll() is not None

    def in_use(self) -> bool:
        """Whether other processes are connected to the store; False if the system does not report connections."""
        with contextlib.suppress(OSError):
            return self.process is not None and sum(one.local[1] == self.port for one in connections()) > OWN
        return False

    def close(self) -> None:
        """Stop listening, and end the process; a forked one, which takes some 20 ms to end, is reaped with strays."""
        self.server.close()
        if self.process and self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGKILL)
            if isinstance(self.process, subprocess.Popen):
                with contextlib.suppress(subprocess.TimeoutExpired):  # a worker traces it
                    self.process.wait(1)


def _listening(address: str, port: int) -> socket.socket:
    if address or not socket.has_dualstack_ipv6():
        return socket.create_server((address, port), backlog=BACKLOG)
    return socket.create_server((address, port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=BACKLOG)


def blocked() -> int:
    """Return a port, of those on which a job's generations have their stores, that sockets without a process block.

    The kernel keeps the sockets of ended processes for a minute, or while their peer does not read. 0 if there is none.
    """
    found = set()
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError), open(f"/proc/self/net/{name}") as file:
            rows = [line.split() for line in file.readlines()[1:]]
            found |= {int(row[1].rpartition(":")[2], 16) for row in rows if row[9] == "0"}  # the inode
    for port in sorted(found & {*range(MASTER_PORT, MASTER_PORT + PORTS)}):
        try:
            _listening("", port).close()
        except OSError:
            return port
    return 0


def expected(env: Env) -> bool:
    """Whether a worker expects the store of its node's master; False if this interpreter has no torch to host one."""
    return env.get(VARIABLE) == "True" and PathFinder.find_spec("torch") is not None
