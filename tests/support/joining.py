"""Nodes of a plain Compose project: one is real; the others, and Docker's DNS, are fake."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from support.optional import not_none
from support.ports import free_port
from support.repo import ROOT
from support.waiting import eventually

# Docker's DNS and the GPUs are fake; messages of trainers come from addresses of the loopback interface.
BOOT = """
import socket, sys
from orchestrate.node import rendezvous as join
names, join.JOIN_PORT, gpus = eval(sys.argv[1])
connect, hosts = join.connect, {"master": "127.0.0.1"}
join.connect = lambda family, address, timeout: connect(family, (hosts[address[0]], address[1]), timeout)
join.gpus = lambda: gpus
socket.gethostbyname_ex = lambda name: (name, [], {"trainer": list(names)}[name])
socket.gethostbyaddr = lambda address: (names[address], [], [address])
sys.exit(join.join(sys.argv[2:]))
"""
NAMES = {"127.0.0.2": "p-trainer-10.p_default", "127.0.0.3": "p-trainer-9.p_default"}
TEN, NINE = NAMES
ON_ONE_MACHINE = {"TORCHELASTIC_USE_AGENT_STORE": "False"}  # on which all masters would listen at one port
HELLO = {"name": "master", "host": "a", "cpus": 8, "gpus": []}
WAITS = "import signal\nprint('ready')\nsignal.pause()"


class Trainer:
    """One side of the connection between a trainer and the master."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock, self.file = sock, sock.makefile("rwb")
        sock.settimeout(30)

    def say(self, **message: object) -> None:
        self.file.write(json.dumps(message).encode() + b"\n")
        self.file.flush()

    def hears(self) -> Any:
        """The next message; None at the end of the connection."""
        line = self.file.readline()
        return json.loads(line) if line else None

    def ranks(self) -> list[str]:
        """The ranks of the workers that it is to start."""
        return [env["RANK"] for env in self.hears()["envs"]]

    def close(self) -> None:
        self.file.close()
        self.sock.close()


class Project:
    """The nodes of a Compose project, one of them real."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port, self.env = folder, free_port(), {}
        self.names, self.gpus = NAMES, []
        self.trainers: list[Trainer] = []
        self.node: subprocess.Popen[bytes] | None = None

    def start(self, code: str, **env: str) -> None:
        (self.folder / "script.py").write_text(code)
        played = repr((self.names, self.port, self.gpus))
        clean = {name: value for name, value in os.environ.items() if name not in ("JOB_ID", "NODE_NPROC")}
        self.node = subprocess.Popen(
            [sys.executable, "-c", BOOT, played, str(self.folder / "script.py")],
            env=clean | {"PYTHONPATH": str(ROOT), "JOB_DIR": str(self.folder), **ON_ONE_MACHINE} | env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def trainer(self, address: str, hello: bool = True, **facts: object) -> Trainer:
        def dial() -> socket.socket | None:
            assert not_none(self.node).poll() is None
            try:
                return socket.create_connection(("127.0.0.1", self.port), source_address=(address, 0))
            except ConnectionRefusedError:
                return None

        self.trainers.append(instance := Trainer(eventually(dial)))
        if hello:
            instance.say(say="hello", **HELLO | facts)
        return instance

    def both(self) -> tuple[Trainer, Trainer]:
        """The trainers 9 and 10; trainer 10 connects first."""
        ten = self.trainer(TEN)
        return self.trainer(NINE), ten

    def ends(self) -> tuple[int, str]:
        """The node's exit code and its output."""
        out, _ = not_none(self.node).communicate(timeout=150)
        return not_none(self.node).returncode, out.decode()

    def ready(self) -> None:
        """Wait until the node's worker is running."""
        logs = self.folder / "logs"
        eventually(lambda: any("ready" in path.read_text() for path in logs.glob("rank-*.log")))


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    instance = Project(tmp_path)
    yield instance
    for trainer in instance.trainers:
        trainer.close()
    if instance.node and instance.node.poll() is None:
        instance.node.kill()
        instance.node.communicate()


@pytest.fixture
def master(project: Project) -> Iterator[Callable[[str], SimpleNamespace]]:
    """Start a real trainer; returns the master's side of its connection and the trainer's first message."""
    with socket.create_server(("127.0.0.1", project.port)) as server:
        server.settimeout(60)

        def start(code: str) -> SimpleNamespace:
            project.start(code, NODE_ROLE="trainer", NODE_GRACE="1000", GIVEN="1")
            side = Trainer(server.accept()[0])
            project.trainers.append(side)
            return SimpleNamespace(side=side, hello=side.hears())

        yield start
