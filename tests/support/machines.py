"""Machines of a cluster, each a container.

They share the project, read-only, and a folder at the path that it has here.
"""

import contextlib
import ipaddress
import os
import secrets
import subprocess
from collections.abc import Iterator
from pathlib import Path

from support.leftovers import docker
from support.repo import ROOT

PYTHON = "/opt/venv/bin/python"


class Machines:
    """Machines of an image, each of which runs `start`, a script in the folder `here` of the tests."""

    def __init__(self, folder: Path, image: str, here: Path) -> None:
        self.folder, self.image, self.here = folder, image, here
        self.name, self.started = f"{here.name}-{secrets.token_hex(4)}", list[str]()
        (folder / "cluster").mkdir()
        (folder / "home").mkdir()

    def build(self, node: str, **arguments: str) -> None:
        """Build their image from that of a node."""
        network = os.environ.get("BUILD_NETWORK", "default")
        given = [
            word for name, value in {"NODE": node, **arguments}.items() for word in ("--build-arg", f"{name}={value}")
        ]
        command = ["docker", "build", "--network", network, *given, "--tag", self.image]
        done = subprocess.run([*command, str(self.here)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]

    def start(self, machine: str, *role: str) -> None:
        """Start a machine."""
        if not self.started:
            self.network()
        names = ["--name", self.of(machine), "--hostname", machine, "--network", self.name, "--network-alias", machine]
        names += ["--ip", str(self.subnet[len(self.started) + 10])]
        folders = [f"{ROOT}:{ROOT}:ro", f"{self.folder}:{self.folder}", f"{self.folder}/cluster:/cluster"]
        mounts = [word for folder in [*folders, f"{self.here / 'start'}:/start:ro"] for word in ("--volume", folder)]
        env = ["--env", f"HOME={self.folder}/home", "--env", f"PYTHONPATH={ROOT}", "--env", "PYTHONDONTWRITEBYTECODE=1"]
        docker(
            "run",
            "--detach",
            "--init",
            "--privileged",
            *names,
            *mounts,
            *env,
            "--entrypoint",
            "/start",
            self.image,
            *role,
        )
        self.started.append(machine)

    def network(self) -> None:
        """Create their network, in which each machine keeps its address when it starts again, as real ones do."""
        docker("network", "create", self.name)
        subnet = docker("network", "inspect", "--format", "{{(index .IPAM.Config 0).Subnet}}", self.name).strip()
        docker("network", "rm", self.name)  # Docker only lets us choose addresses in a subnet that was given
        self.subnet = ipaddress.IPv4Network(subnet)
        docker("network", "create", "--subnet", subnet, self.name)

    def of(self, machine: str) -> str:
        """The container of a machine."""
        return f"{self.name}-{machine}"

    def run(self, machine: str, folder: Path, *command: str) -> str:
        """Run a command on a machine, and return its output."""
        words = ["docker", "exec", "--workdir", str(folder), self.of(machine), *command]
        return subprocess.run(words, capture_output=True, text=True).stdout

    def kill(self, pid: int, machine: str) -> None:
        """Kill a process."""
        self.run(machine, self.folder, PYTHON, "-c", f"import os; os.kill({pid}, 9)")

    @contextlib.contextmanager
    def without(self, machine: str) -> Iterator[None]:
        """Kill a machine, and start it again after the block."""
        docker("kill", self.of(machine))
        try:
            yield
        finally:
            docker("start", self.of(machine))

    def down(self) -> None:
        """Remove them."""
        docker("rm", "--force", "--volumes", *map(self.of, self.started))
        docker("network", "rm", self.name)
