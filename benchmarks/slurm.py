"""Slurm: from submission to the first step, and from the SIGKILL of a worker to the next; four machines, containers."""

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.restart import STEP, Ours, Training, ends, restarts
from benchmarks.starts import NODES, ROOT

sys.path.insert(0, str(ROOT / "tests"))
from support.machines import PYTHON  # noqa: E402
from support.slurm_cluster import Cluster  # noqa: E402

STEPS = f"{ROOT}/benchmarks/steps.py"
START_TIMEOUT = 120.0  # seconds for a job to take its first step
# What a hand-written batch script does; `srun` is what all ways to start a job on Slurm have in common.
BY_HAND = f"""#!/bin/bash
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) MASTER_PORT=29500
export WORLD_SIZE=$SLURM_NNODES OMP_NUM_THREADS=1
srun bash -c 'RANK=$SLURM_PROCID exec {PYTHON} {STEPS} 1000000 > rank-$SLURM_PROCID.log'
"""


class OnSlurm(Training):
    """A job on the cluster, whose first step has been taken `first` seconds after it was submitted."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        """Submit a job in a new folder, and wait for its first step."""
        self.cluster, self.folder = cluster, folder
        folder.mkdir()
        started = time.time()
        self.submit()
        while not all(found := [STEP.findall(tail) for tail in self.tails()]):
            if time.time() > started + START_TIMEOUT:
                raise TimeoutError(cluster("squeue"))
            time.sleep(0.01)
        self.first = max(float(steps[0][1]) for steps in found) - started

    def submit(self) -> None:
        """Submit it."""
        raise NotImplementedError

    def tails(self) -> list[str]:
        """Read the files with the output of each rank."""
        return ends(self.folder.glob("**/rank-*.log"), NODES)

    def alive(self) -> bool:
        """Whether the job is in the queue."""
        return bool(self.cluster("squeue", "--noheader"))

    def container(self, rank: int) -> str:
        """The machine of a rank: they are in the same order."""
        return str(self.cluster.of(f"n{rank + 1}"))

    def end(self) -> None:
        """Cancel the job, and wait until the machines are idle."""
        self.cluster.settle()


class ByHand(OnSlurm):
    """With `sbatch` and `srun`."""

    def submit(self) -> None:
        """Write a batch script, and submit it."""
        (self.folder / "job.sh").write_text(BY_HAND)
        self.cluster("sbatch", f"--nodes={NODES}", "job.sh", folder=self.folder)


class Supervised(OnSlurm):
    """With `orchestrate run --engine slurm`."""

    def submit(self) -> None:
        """Copy the script, since only the current folder is copied to the job, and submit it."""
        (self.folder / "steps.py").write_text(Path(STEPS).read_text())
        words = ["run", "--engine", "slurm", "--detach", "--nodes", str(NODES), "--max-restarts", "1000000"]
        process = self.cluster.orchestrate(self.folder, *words, "--", "steps.py", "1000000")
        _, said = process.communicate()
        if process.returncode:
            raise RuntimeError(said)


class Local(Ours):
    """The same job with local processes."""

    def __init__(self) -> None:
        super().__init__("--engine", "process")

    def kill_worker(self, rank: int) -> float:
        """Send SIGKILL to a worker; return the time."""
        moment = time.time()
        os.kill(int(self.pids()[rank].partition(".")[0]), signal.SIGKILL)
        return moment


@contextmanager
def cluster() -> Iterator[Cluster]:
    """A cluster of as many machines as there are ranks."""
    with tempfile.TemporaryDirectory() as folder:
        made = Cluster(Path(folder), NODES)
        try:
            yield made
        finally:
            made.down()
            subprocess.run(["rm", "-rf", folder], check=True)  # with files of the root of containers


def measure(runs: int) -> dict[str, Any]:
    """Measure both ways to submit in turn, and then restarts, on Slurm and with local processes."""
    starts: dict[str, list[float]] = {"sbatch and srun (baseline)": [], "orchestrate": []}
    with cluster() as machines:
        for number in range(runs):
            for name, kind in zip(starts, (ByHand, Supervised)):
                job = kind(machines, machines.folder / f"{kind.__name__.lower()}-{number}")
                starts[name].append(job.first)
                if number < runs - 1 or kind is ByHand:
                    job.end()
        on_slurm, lost = restarts(job, "kill_worker", 4 * runs)
    with_processes, _ = restarts(Local(), "kill_worker", 4 * runs)
    values = {f"submission to first step: {name}": (found, "s") for name, found in starts.items()}
    values |= {"restart on Slurm": (on_slurm, "s"), "restart with local processes": (with_processes, "s")}
    by_hand, ours = map(statistics.median, starts.values())
    slower = statistics.median(on_slurm) / statistics.median(with_processes)
    return {
        "values": values,
        "ratios": {
            "submission to first step ÷ baseline": ours / by_hand,
            "restart on Slurm ÷ local processes (≤ 1.5)": slower,
            f"jobs lost in {len(on_slurm) + lost} kills on Slurm (≤ 0)": float(lost),
        },
    }
