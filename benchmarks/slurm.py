"""Slurm: from submission to the first step, and which faults a job survives; four machines, containers."""

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
from benchmarks.starts import NODES, ROOT, docker

sys.path.insert(0, str(ROOT / "tests"))
from support.machines import PYTHON  # noqa: E402
from support.slurm_cluster import Cluster  # noqa: E402

STEPS = f"{ROOT}/benchmarks/steps.py"
START_TIMEOUT = 120.0  # seconds for a job to take its first step
PEERS = ("torchx", "submitit")
FAULTS = ("kill_worker", "kill_machine", "preempt")
# What a hand-written batch script does; `srun` is what all ways to start a job on Slurm have in common.
BY_HAND = f"""#!/bin/bash
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) MASTER_PORT=29500
export WORLD_SIZE=$SLURM_NNODES OMP_NUM_THREADS=1
srun bash -c 'RANK=$SLURM_PROCID exec {PYTHON} -c "$CODE" .'
"""
# The script with its output in a file for each rank, in the folder that is the argument, and its machine in another.
STEPS_TO_FILE = f"""
import os, runpy, socket, sys
rank = os.environ["RANK"]
os.chdir(sys.argv[1])
with open(f"host-{{rank}}", "w") as file:
    file.write(socket.gethostname())
os.dup2(os.open(f"rank-{{rank}}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
sys.argv = ["steps.py", "1000000"]
runpy.run_path("{STEPS}", run_name="__main__")
"""
BY_SUBMITIT = f"""
import submitit, sys
class Train(submitit.helpers.Checkpointable):
    def __call__(self, folder):
        submitit.helpers.TorchDistributedEnvironment().export()
        sys.argv = ["", folder]
        exec({STEPS_TO_FILE!r}, {{}})
executor = submitit.AutoExecutor(folder=f"{{sys.argv[1]}}/submitit", cluster="slurm")
executor.update_parameters(nodes={NODES}, tasks_per_node=1, timeout_min=600)
executor.submit(Train(), sys.argv[1])
"""


class OnSlurm(Training):
    """A job on the cluster, whose first step has been taken `first` seconds after it was submitted."""

    timeout = 300.0  # a job that Slurm has requeued starts two minutes later

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

    def peer(self, code: str, *arguments: str) -> None:
        """Run Python code that uses packages of peers, on the machine for logging in."""
        path = f"PYTHONPATH={self.cluster.folder}/peers"
        self.cluster("env", path, PYTHON, "-c", code, *arguments, folder=self.folder)

    def tails(self) -> list[str]:
        """Read the files with the output of each rank."""
        return ends(self.folder.glob("**/rank-*.log"), NODES)

    def alive(self) -> bool:
        """Whether the job is in the queue."""
        return bool(self.cluster("squeue", "--noheader", "--partition", "all"))

    def container(self, rank: int) -> str:
        """The machine of a rank."""
        return str(self.cluster.of((self.folder / f"host-{rank}").read_text()))

    def kill_machine(self) -> float:
        """Kill the machine of the last rank, as if it had lost its power, and boot it; return the time."""
        moment = self.kill_node(NODES - 1)
        docker("start", self.container(NODES - 1))
        return moment

    def preempt(self) -> float:
        """Submit a job of a higher priority, which needs all machines for a moment; return the time."""
        moment = time.time()
        self.cluster("sbatch", "--partition", "urgent", f"--nodes={NODES}", "--wrap", "true", folder=self.folder)
        return moment

    def end(self) -> None:
        """Cancel the job, and wait until the machines are idle."""
        self.cluster.settle()


class ByHand(OnSlurm):
    """With `sbatch` and `srun`."""

    def submit(self) -> None:
        """Write a batch script, and submit it."""
        (self.folder / "job.sh").write_text(BY_HAND)
        self.cluster("env", f"CODE={STEPS_TO_FILE}", "sbatch", f"--nodes={NODES}", "job.sh", folder=self.folder)


class TorchX(OnSlurm):
    """With TorchX's scheduler `slurm`, whose component `dist.ddp` runs torchrun on each machine."""

    def submit(self) -> None:
        """Submit it."""
        (self.folder / "steps.py").write_text(STEPS_TO_FILE)
        words = ["run", "--scheduler", "slurm", "--workspace", "", "dist.ddp", "-j", f"{NODES}x1", "--max_retries", "3"]
        words += ["--cpu", "1", "--memMB", "1000", "--env", "OMP_NUM_THREADS=1", "--script", f"{self.folder}/steps.py"]
        self.peer("from torchx.cli.main import main; main()", *words, "--", str(self.folder))


class Submitit(OnSlurm):
    """With submitit, as a callable that may be requeued."""

    def submit(self) -> None:
        """Submit it."""
        self.peer(BY_SUBMITIT, str(self.folder))


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

    def container(self, rank: int) -> str:
        """The machine of a rank: they are in the same order."""
        return str(self.cluster.of(f"n{rank + 1}"))


class Local(Ours):
    """The same job with local processes."""

    def __init__(self) -> None:
        super().__init__("--engine", "process")

    def kill_worker(self, rank: int) -> float:
        """Send SIGKILL to a worker; return the time."""
        moment = time.time()
        os.kill(int(self.pids()[rank].partition(".")[0]), signal.SIGKILL)
        return moment


WAYS: dict[str, type[OnSlurm]] = {
    "sbatch and srun (baseline)": ByHand,
    "TorchX": TorchX,
    "submitit": Submitit,
    "orchestrate": Supervised,
}


@contextmanager
def cluster() -> Iterator[Cluster]:
    """A cluster of as many machines as there are ranks, which have the packages of peers."""
    with tempfile.TemporaryDirectory() as folder:
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--target", f"{folder}/peers", *PEERS]
        subprocess.run(install, check=True, capture_output=True)
        made = Cluster(Path(folder), NODES)
        try:
            yield made
        finally:
            made.down()
            subprocess.run(["rm", "-rf", folder], check=True)  # with files of the root of containers


def survived(job: OnSlurm, fault: str) -> float | None:
    """Seconds from a fault until every rank has completed another step, None if that never happens; ends the job."""
    before = job.pids()
    try:
        return job.restarted(job.kill_worker(1) if fault == "kill_worker" else getattr(job, fault)(), before)
    except TimeoutError:
        return None
    finally:
        job.end()


def measure(runs: int) -> dict[str, Any]:
    """Measure all ways to submit in turn, each with a fault, and then restarts, on Slurm and with local processes."""
    values: dict[str, tuple[list[float], str]] = {}
    lost = dict.fromkeys(WAYS, 0)
    number = 0
    with cluster() as machines:
        for fault in (FAULTS * runs)[: max(runs, len(FAULTS))]:
            for name, way in WAYS.items():
                job = way(machines, machines.folder / f"job-{(number := number + 1)}")
                values.setdefault(f"submission to first step: {name}", ([], "s"))[0].append(job.first)
                if (seconds := survived(job, fault)) is None:
                    lost[name] += 1
                else:
                    values.setdefault(f"{fault.replace('_', ' ')} to next step: {name}", ([], "s"))[0].append(seconds)
        on_slurm, failed = restarts(Supervised(machines, machines.folder / "restarts"), "kill_worker", 4 * runs)
    with_processes, _ = restarts(Local(), "kill_worker", 4 * runs)
    values |= {"restart on Slurm": (on_slurm, "s"), "restart with local processes": (with_processes, "s")}
    first = {name: statistics.median(values[f"submission to first step: {name}"][0]) for name in WAYS}
    slower = statistics.median(on_slurm) / statistics.median(with_processes)
    return {
        "values": values,
        "ratios": {
            "submission to first step ÷ baseline": first["orchestrate"] / first["sbatch and srun (baseline)"],
            "submission to first step ÷ TorchX": first["orchestrate"] / first["TorchX"],
            "restart on Slurm ÷ local processes (≤ 1.5)": slower,
            f"jobs lost in {len(on_slurm) + failed} kills on Slurm (≤ 0)": float(failed),
            **{f"jobs lost by {name}": float(count) for name, count in lost.items()},
        },
    }
