"""Restart: from the SIGKILL of a worker to the moment when every rank is past its next step; four nodes."""

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.starts import NODES, ROOT, docker

PATIENCE = 60.0  # seconds after which a restart counts as failed


class Training:
    """The script steps.py, on four nodes, under `orchestrate`."""

    def __init__(self, folder: str, *options: str) -> None:
        command = [sys.executable, "-m", "orchestrate", "run", "--gpus", "none", "--trainers", str(NODES - 1)]
        limits = ["--max-restarts", "1000000", "--set", "grace=5s", "--runs", folder, *options]
        with open(os.devnull, "w") as null:
            script = ["--", "benchmarks/steps.py", "1000000"]
            self.process = subprocess.Popen([*command, *limits, *script], stdout=null, stderr=null, cwd=ROOT)
        while not (found := list(Path(folder).glob("*/logs/rank-*.log"))) or len(found) < NODES:
            time.sleep(0.05)
        self.run = found[0].parents[1]

    def tails(self) -> list[str]:
        """The end of each rank's log."""
        tails = []
        for rank in range(NODES):
            with (self.run / "logs" / f"rank-{rank}.log").open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
                tails.append(file.read().decode(errors="replace"))
        return tails

    def past(self, moment: float, generation: int) -> bool:
        """Whether every rank has done a step of a generation after a moment."""
        mark = f"[node] generation {generation}\n"
        for tail in self.tails():
            text = tail.rpartition(mark)[2] if generation else tail
            times = [float(found) for found in re.findall(r"step \d+ at ([\d.]+)\n", text)]
            if (generation and mark not in tail) or not times or times[-1] <= moment:
                return False
        return True

    def wait_until_past(self, moment: float, generation: int) -> float:
        """Seconds from a moment until every rank has done a step of a generation; raises TimeoutError."""
        while not self.past(moment, generation):
            if time.time() - moment > PATIENCE or self.process.poll() is not None:
                raise TimeoutError
            time.sleep(0.005)
        firsts, mark = [], f"[node] generation {generation}\n"
        for rank in range(NODES):
            text = (self.run / "logs" / f"rank-{rank}.log").read_text().rpartition(mark)[2]
            firsts.append(min(float(found) for found in re.findall(r"step \d+ at ([\d.]+)\n", text)))
        return max(firsts) - moment

    def container(self, rank: int) -> str:
        """The container of a rank."""
        plan = json.loads((self.run / "plan.json").read_text())
        node = plan["workers"][rank]["node"]
        return f"{self.run.name}-{'master-1' if node == 'master' else node}"

    def kill_worker(self, rank: int) -> float:
        """SIGKILL; returns when."""
        pid = int(re.findall(r"pid (\d+) step", self.tails()[rank])[-1])
        code = f"import os, time; print(time.time()); os.kill({pid}, {int(signal.SIGKILL)})"
        return float(docker("exec", self.container(rank), "python", "-c", code))

    def kill_node(self, rank: int) -> float:
        """SIGKILL to the container; returns when."""
        moment = time.time()
        docker("kill", self.container(rank))
        return moment

    def end(self) -> None:
        """Stop the job."""
        self.process.send_signal(signal.SIGINT)
        self.process.wait()


def restarts(kind: str, kills: int, *options: str) -> tuple[list[float], int]:
    """Seconds of each restart, and how many failed."""
    seconds, lost = [], 0
    with tempfile.TemporaryDirectory() as folder:
        job = Training(folder, *options)
        try:
            job.wait_until_past(time.time(), 0)
            for number in range(kills):
                time.sleep(1.0)  # a training, not a crash loop
                try:
                    seconds.append(job.wait_until_past(getattr(job, kind)(number % NODES), number + 1))
                except TimeoutError:
                    lost += 1
                    break
        finally:
            job.end()
    return seconds, lost + kills - len(seconds) - lost


def measure(runs: int) -> dict[str, Any]:
    """Ten kills for each run that is asked for."""
    seconds, lost = restarts("kill_worker", 10 * runs)
    ordered = sorted(seconds)
    ratios = {
        "median, in seconds (≤ 0.5)": statistics.median(ordered),
        "95th percentile, in seconds (≤ 1)": ordered[int(0.95 * (len(ordered) - 1))],
        "restarts that failed (≤ 0)": float(lost),
    }
    return {"values": {"SIGKILL to the next step of all": (seconds, "s")}, "ratios": ratios}
