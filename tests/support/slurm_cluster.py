"""A real cluster of Slurm, Debian's: a machine for its controller and for logging in, and others that compute."""

import os
import subprocess
from pathlib import Path

from support.machines import PYTHON, Machines
from support.optional import not_none
from support.repo import ROOT
from support.waiting import eventually

# The image of a node, whose Debian has the version of Slurm: see .ci/slurm for others.
NODE = os.environ.get("ORCHESTRATE_SLURM_NODE", "orchestrate-node:0.1")
ACCOUNTING = os.environ.get("ORCHESTRATE_SLURM_ACCOUNTING", "")  # not empty: with Slurm's database


class Cluster(Machines):
    """Machines n1 to nN, and `slurm`."""

    def __init__(self, folder: Path, size: int = 3) -> None:
        version = NODE.rpartition(":")[2] + "-accounting" * bool(ACCOUNTING)
        super().__init__(folder, f"orchestrate-slurm:{version}", ROOT / "tests" / "slurm")
        self.build(NODE, ACCOUNTING=ACCOUNTING)
        self.start("slurm", "controller", str(size))
        self.nodes = [f"n{number + 1}" for number in range(size)]
        for node in self.nodes:
            self.start(node, "node")
        self.wait()

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
        return self.run(machine, folder or self.folder, *command)

    def orchestrate(self, folder: Path, *arguments: str) -> subprocess.Popen[str]:
        """Start our command on the machine for logging in."""
        words = ["docker", "exec", "--workdir", str(folder), self.of("slurm"), PYTHON, "-m", "orchestrate", *arguments]
        return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def state(self, job: str) -> str:
        """The state of a job."""
        found = dict(word.partition("=")[::2] for word in self("scontrol", "show", "job", "-o", job).split())
        return not_none(found.get("JobState"))
