"""A real cluster of Slurm, Debian's: a machine for its controller and for logging in, and others that compute.

Each is a container; they share the project, read-only, and a folder at the path that it has here.
"""

import os
import secrets
import subprocess
from pathlib import Path

from support.leftovers import docker
from support.optional import not_none
from support.repo import ROOT
from support.waiting import eventually

# The image of a node, whose Debian has the version of Slurm: see .ci/slurm for others.
NODE = os.environ.get("ORCHESTRATE_SLURM_NODE", "orchestrate-node:0.1")
IMAGE, HERE = f"orchestrate-slurm:{NODE.rpartition(':')[2]}", ROOT / "tests" / "slurm"
PYTHON = "/opt/venv/bin/python"


def build() -> None:
    """Build the image of the machines."""
    network = os.environ.get("BUILD_NETWORK", "default")
    command = ["docker", "build", "--network", network, "--build-arg", f"NODE={NODE}", "--tag", IMAGE, str(HERE)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


class Cluster:
    """Machines n1 to nN, and `slurm`."""

    def __init__(self, folder: Path, size: int = 3) -> None:
        self.folder, self.name = folder, f"slurm-{secrets.token_hex(4)}"
        (folder / "cluster").mkdir()
        (folder / "home").mkdir()
        docker("network", "create", self.name)
        self._start("slurm", "controller", str(size))
        self.nodes = [f"n{number + 1}" for number in range(size)]
        for node in self.nodes:
            self._start(node, "node")
        self.wait()

    def _start(self, machine: str, *role: str) -> None:
        names = ["--name", self.of(machine), "--hostname", machine, "--network", self.name, "--network-alias", machine]
        folders = [f"{ROOT}:{ROOT}:ro", f"{self.folder}:{self.folder}", f"{self.folder}/cluster:/cluster"]
        mounts = [word for folder in [*folders, f"{HERE / 'start'}:/start:ro"] for word in ("--volume", folder)]
        env = ["--env", f"HOME={self.folder}/home", "--env", f"PYTHONPATH={ROOT}", "--env", "PYTHONDONTWRITEBYTECODE=1"]
        docker("run", "--detach", "--init", *names, *mounts, *env, "--entrypoint", "/start", IMAGE, *role)

    def of(self, machine: str) -> str:
        """The container of a machine."""
        return f"{self.name}-{machine}"

    def wait(self) -> None:
        """Wait until all machines are idle."""
        idle = {f"{node} idle" for node in self.nodes}
        eventually(lambda: {*self("sinfo", "--noheader", "--Node", "--format", "%N %T").splitlines()} == idle, 60)

    def settle(self) -> None:
        """Cancel all jobs, and wait until all machines are idle."""
        self("scancel", "--user", "root")
        self.wait()

    def __call__(self, *command: str, machine: str = "slurm", folder: Path | None = None) -> str:
        """Run a command on a machine, and return its output."""
        where = ["--workdir", str(folder or self.folder)]
        words = ["docker", "exec", *where, self.of(machine), *command]
        return subprocess.run(words, capture_output=True, text=True).stdout

    def orchestrate(self, folder: Path, *arguments: str) -> subprocess.Popen[str]:
        """Start our command on the machine for logging in."""
        words = ["docker", "exec", "--workdir", str(folder), self.of("slurm"), PYTHON, "-m", "orchestrate", *arguments]
        return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def kill(self, pid: int, machine: str) -> None:
        """Kill a process."""
        self(PYTHON, "-c", f"import os; os.kill({pid}, 9)", machine=machine)

    def state(self, job: str) -> str:
        """The state of a job."""
        found = dict(word.partition("=")[::2] for word in self("scontrol", "show", "job", "-o", job).split())
        return not_none(found.get("JobState"))

    def down(self) -> None:
        """Remove it."""
        docker("rm", "--force", "--volumes", *map(self.of, ["slurm", *self.nodes]))
        docker("network", "rm", self.name)
