"""Restart on GPUs: from the SIGKILL of a worker until every rank has completed another step."""

import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import gpu
from benchmarks.restart import Training, ends
from benchmarks.starts import ROOT

KILLS = 3  # per run, under orchestrate; torchrun gets one
OURS, THEIRS = "orchestrate", "torchrun"
PAUSE = 0.5  # seconds of training between a restart and the next kill


class Local(Training):
    """The script gpu_steps.py in local processes, under any launcher."""

    def __init__(self, ranks: gpu.Group, launcher: list[str]) -> None:
        """Start it; each rank writes to a file in a temporary folder."""
        self.folder, self.ranks = tempfile.TemporaryDirectory(), ranks.ranks
        script = ["benchmarks/gpu_steps.py", gpu.DEVICE, ranks.backend, self.folder.name]
        self.process = subprocess.Popen(
            [*launcher, *script],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=ROOT,
            env=gpu.environment(ranks.ranks),
        )

    def tails(self) -> list[str]:
        """Read the end of each rank's file."""
        return ends(Path(self.folder.name).glob("rank-*.log"), self.ranks)

    def kill_worker(self, rank: int) -> float:
        """Send SIGKILL to a worker; return the time."""
        pid = int(self.pids()[rank].partition(".")[0])
        moment = time.time()
        os.kill(pid, signal.SIGKILL)
        return moment

    def alive(self) -> bool:
        """Whether the launcher is running."""
        return self.process.poll() is None

    def end(self) -> None:
        """Stop the launcher, which stops its workers."""
        gpu.stop(self.process)
        self.folder.cleanup()


def restarts(job: Local, kills: int) -> tuple[list[float], int]:
    """Seconds of each restart, and 1 if the job was lost, which ends the kills, otherwise 0."""
    seconds: list[float] = []
    try:
        job.restarted(time.time(), [""] * job.ranks)
        for number in range(kills):
            time.sleep(PAUSE)
            before = job.pids()
            seconds.append(job.restarted(job.kill_worker(number % job.ranks), before))
    except (TimeoutError, ProcessLookupError):
        return seconds, 1
    finally:
        job.end()
    return seconds, 0


def measure(runs: int) -> dict[str, Any]:
    """Kill KILLS workers per run under orchestrate, and one under torchrun, each in one job."""
    ranks = gpu.group()
    with tempfile.TemporaryDirectory() as folder:
        options = [*ranks.options, "--max-restarts", "1000000", "--runs", folder, "--"]
        ours, lost = restarts(Local(ranks, gpu.orchestrate("run", *options)), KILLS * runs)
    torchrun = [*gpu.TORCHRUN, str(ranks.ranks), "--max-restarts", "1000"]
    theirs, theirs_lost = restarts(Local(ranks, torchrun), runs)
    found = {OURS: ours, THEIRS: theirs}
    values = {f"{name}, {ranks.about}": seconds for name, seconds in found.items() if seconds}
    failed = {name: "no worker was restarted" for name, seconds in found.items() if not seconds}
    ratios = gpu.medians(found, {"median, in seconds": OURS}) | gpu.ratios(
        found, {"orchestrate ÷ torchrun": (OURS, THEIRS)}
    )
    ratios[f"jobs lost in {len(ours) + lost} kills (≤ 0)"] = float(lost)
    ratios[f"jobs lost by torchrun in {len(theirs) + theirs_lost} kills"] = float(theirs_lost)
    return gpu.result(values, "s", ratios, failed | gpu.without_nccl(ranks))
