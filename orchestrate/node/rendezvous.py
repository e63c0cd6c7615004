"""Mode `rendezvous`: the containers of a plain `docker compose up` become one gang, without a Docker socket.

Compose starts every trainer before the master (`depends_on`), so when the master queries it, Docker's DNS knows all
of them: the alias `trainer` resolves to their addresses, and each address back to its Compose name with its number.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from functools import partial
from typing import Any

from orchestrate.node.loop import Loop
from orchestrate.node.messages.channel import Channel, connect
from orchestrate.node.messages.checks import MAX_WORKERS, Refused, integer, seconds, shown
from orchestrate.node.messages.listener import serve
from orchestrate.node.messages.protocol import TO_MASTER, TO_TRAINER, End, Exited, Hello, Run, decode
from orchestrate.node.output import print_message
from orchestrate.node.ranks import DEFAULTS, MASTER_PORT, Node, assign, gpus

JOIN_PORT = 29400  # where the master listens for trainers; the default port of torch's own rendezvous
TOO_MANY = "use fewer nodes (--scale trainer=N), or train on CPU (docker compose --profile cpu up)"


def join(command: list[str]) -> int:
    """Train with the other containers of this Compose project; return the exit code of the first failure, or 0.

    Raises Refused for an invalid environment variable.
    """
    with open("/proc/sys/kernel/random/boot_id") as file:
        host = file.read().strip()
    node = {"name": "master", "host": host, "cpus": os.cpu_count() or 1, "gpus": gpus()}
    timeout = seconds(os.environ, "NODE_JOIN_TIMEOUT", 120)
    if os.environ.get("NODE_ROLE") == "trainer":
        return follow(command, node, timeout)
    gang = Gang(command, node)
    gang.loop.after(timeout, gang.late)
    gang.loop.run()
    return gang.code


def trainers() -> dict[str, str]:
    """Return address and name of each trainer of the project, in Compose's order."""
    for left in (2, 1, 0):
        try:
            addresses = socket.gethostbyname_ex("trainer")[2]
            break
        except socket.gaierror as error:
            if error.errno == socket.EAI_NONAME or not left:
                return {}  # `--scale trainer=0`
            time.sleep(0.5)  # Docker's DNS has asked an upstream server, which answers slowly
    numbers = {address: number(address) for address in addresses}
    return {address: f"trainer-{numbers[address]}" for address in sorted(addresses, key=lambda a: (numbers[a], a))}


def number(address: str) -> int:
    """The number of the trainer at an address; 0 if it has ended since its address was resolved."""
    try:
        match = re.search(r"-(\d+)\.", socket.gethostbyaddr(address)[0])
    except OSError:
        return 0
    return int(match[1]) if match else 0


class Gang:
    """The master's side: waits for the trainers, ranks them, and runs the job to its end."""

    def __init__(self, command: list[str], node: Node) -> None:
        """Listen for the trainers that DNS knows; `command` runs once all of them have joined."""
        self.command, self.node = command, node
        self.code = 0  # the first failure's exit code
        self.loop = Loop()
        self.loop.on_end = self.stop_trainers
        self.names = trainers()
        self.hellos: dict[str, Node] = {}
        self.channels: dict[str, Channel] = {}
        self.running: dict[int, str] = {}  # rank: the name of its node
        self.server = socket.create_server(("", JOIN_PORT), backlog=128)
        serve(self.loop, self.server, self.accept)
        numbers = {int(name.rpartition("-")[2]) for name in self.names.values()}
        if missing := [f"trainer-{each}" for each in range(1, max(numbers, default=0)) if each not in numbers]:
            print_message(f"training without {', '.join(missing[:8])}: ended before the others have joined, or removed")
        self.settle()

    def accept(self, connection: socket.socket, other: tuple[str, int]) -> None:
        """Accept a trainer; close connections from other hosts, and further ones from a trainer."""
        address = other[0]
        if address not in self.names or address in self.channels:
            connection.close()
        else:
            self.channels[address] = Channel(self.loop, connection, lambda message: self.receive(address, message))

    def receive(self, address: str, message: Any) -> None:
        """Handle a trainer's message: its hello, the end of one of its workers, or (None) its own end.

        Raises Refused for anything else, including the end of another node's worker.
        """
        name = self.names[address]
        if message is None:
            left = [rank for rank, holder in self.running.items() if holder == name]
            if left:
                self.exited(min(left), 128 + signal.SIGKILL)
            elif len(self.hellos) < len(self.names) and not self.loop.ending:
                self.fail(f"error: {name} disconnected before the job started")
            return
        report = decode(message, TO_MASTER, "say")
        if isinstance(report, Hello):
            if address in self.hellos:
                raise Refused(f"{name} has joined already")
            self.hellos[address] = {**report._asdict(), "name": name}
            self.settle()
        elif self.running.get(report.rank) != name:
            raise Refused(f"rank {report.rank} does not run on {name}")
        else:
            self.exited(report.rank, report.code)

    def settle(self) -> None:
        """Once all trainers have joined, start the workers of every node."""
        if len(self.hellos) < len(self.names):
            return
        nodes = [self.node, *(self.hellos[address] for address in self.names)]
        try:
            nproc = integer(os.environ, "NODE_NPROC", default=1, least=1, most=MAX_WORKERS)
            envs = assign(nodes, nproc, "master", MASTER_PORT, os.environ.get("JOB_ID", "compose"), "eth0")
        except Refused as error:
            return self.fail(f"error: {error}")
        except ValueError as error:
            return self.fail(f"error: {error}\n[node] hint: {TOO_MANY}")
        self.running = {rank: nodes[rank // nproc]["name"] for rank in range(len(envs))}
        print_message(f"{len(nodes)} nodes, world size {len(envs)}, rank 0 on the master")
        start(self.loop, self.command, envs[:nproc], self.exited)
        for i, address in enumerate(self.names, 1):
            self.channels[address].send(Run(envs[i * nproc : (i + 1) * nproc]))

    def exited(self, rank: int, code: int) -> None:
        """Record the end of a worker; the first failure ends the gang, as does the end of the last worker."""
        name = self.running.pop(rank, None)
        if code and name and not self.loop.ending:
            print_message(f"rank {rank} on {name} failed with exit code {code}; stopping the others")
        if code:
            self.code = self.code or code
            self.loop.stop(end=True)
        elif not self.running:
            self.loop.ending = True

    def fail(self, text: str) -> None:
        """End a gang that cannot start."""
        print_message(text)
        self.code = 1
        self.loop.stop(end=True)

    def stop_trainers(self) -> None:
        """Tell every trainer to stop."""
        for channel in self.channels.values():
            channel.send(End())

    def late(self) -> None:
        """At the deadline, fail if a trainer is missing."""
        missing = [name for address, name in self.names.items() if address not in self.hellos]
        if missing:
            self.fail(f"error: {', '.join(missing)} did not join in time")


def follow(command: list[str], node: Node, timeout: float) -> int:
    """Register with the master and run the workers that it assigns; return the exit code of the first failure, or 0."""
    try:
        connection = connect(socket.AF_INET, ("master", JOIN_PORT), timeout)
    except OSError as error:
        print_message(f"error: cannot connect to the master: {error}")
        return 1
    trainer = Trainer(command, connection)
    trainer.channel.send(Hello(**node))
    trainer.loop.run()
    return next(filter(None, trainer.codes), 0)


class Trainer:
    """A trainer's side: runs the workers that the master assigns, once."""

    def __init__(self, command: list[str], connection: socket.socket) -> None:
        """Handle messages of the master; each worker runs `command`."""
        self.command, self.loop = command, Loop()
        self.codes: list[int] = []  # of workers that have ended or failed to start
        self.started = False
        self.channel = Channel(self.loop, connection, self.receive)

    def receive(self, message: Any) -> None:
        """Handle the master's message: workers to start, a stop, or (None) its end; raises Refused for others."""
        if message is None:
            if not self.started:
                print_message("error: the master has closed the connection: its job has started without this trainer")
                self.codes.append(1)
            self.loop.stop(end=True)
        elif message.get("say") == "refused":
            print_message(f"error: the master refused this trainer: {shown(str(message.get('error')))}")
            self.codes.append(1)
            self.loop.stop(end=True)
        elif isinstance(asked := decode(message, TO_TRAINER), End):
            self.loop.stop(end=True)
        elif self.started:
            raise Refused("the workers were started already")
        else:
            self.started = True
            start(self.loop, self.command, asked.envs, self.exited)

    def exited(self, rank: int, code: int) -> None:
        """Report the end of a worker to the master; the end of the last one ends the node."""
        self.codes.append(code)
        self.channel.send(Exited(rank, code))
        self.loop.ending = self.loop.ending or not self.loop.workers


def start(loop: Loop, command: list[str], envs: list[dict[str, str]], exited: Any) -> None:
    """Start a worker for each environment; `exited` gets rank and exit code."""
    for env in envs:
        rank = int(env["RANK"])
        own = {name: os.environ[name] for name in DEFAULTS & os.environ.keys()}
        loop.start(command, {**os.environ, **env, **own}, None, partial(exited, rank))
