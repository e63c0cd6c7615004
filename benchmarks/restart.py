"""Restart: from the SIGKILL of a worker until every rank has completed another step; four nodes."""

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.starts import COMPOSE, NODES, ROOT, docker, plain_image

RESTART_TIMEOUT = 60.0  # seconds after which a restart counts as failed
TAIL = 1 << 13  # bytes read from the end of a log
STEP = re.compile(r"pid (\S+) step \d+ at ([\d.]+)")


def ends(logs: Iterable[Path], ranks: int) -> list[str]:
    """The end of each rank's output, from files named `rank-N.log`; empty for a rank without a file."""
    found = [""] * ranks
    for path in logs:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
            found[int(path.stem.rpartition("-")[2])] = file.read().decode(errors="replace")
    return found


class Training:
    """The script steps.py on four nodes, and faults to inject."""

    timeout = RESTART_TIMEOUT

    def tails(self) -> list[str]:
        """The end of each rank's output."""
        raise NotImplementedError

    def container(self, rank: int) -> str:
        """The container of a rank."""
        raise NotImplementedError

    def alive(self) -> bool:
        """Whether the job is running."""
        raise NotImplementedError

    def end(self) -> None:
        """Stop the job."""
        raise NotImplementedError

    def pids(self) -> list[str]:
        """The newest process of each rank, and its generation, as `PID.GENERATION`."""
        return [(STEP.findall(tail) or [("", "")])[-1][0] for tail in self.tails()]

    def restarted(self, moment: float, before: list[str]) -> float:
        """Seconds from `moment` until every rank has completed a step in a process not in `before`.

        Raises TimeoutError if that takes longer than `timeout`, or the job ends.
        """
        while time.time() - moment < self.timeout and self.alive():
            steps = [STEP.findall(tail) for tail in self.tails()]
            own = [
                [float(at) for pid, at in found if pid != old and float(at) > moment]
                for found, old in zip(steps, before)
            ]
            if all(own):
                return max(times[0] for times in own) - moment
            time.sleep(0.01)
        raise TimeoutError

    def kill_worker(self, rank: int) -> float:
        """Send SIGKILL to a worker; return the time."""
        pid = self.pids()[rank].partition(".")[0]
        code = f"import os, time; print(time.time()); os.kill({pid}, {int(signal.SIGKILL)})"
        return float(docker("exec", self.container(rank), "python", "-c", code))

    def kill_node(self, rank: int) -> float:
        """Send SIGKILL to a node's container; return the time."""
        moment = time.time()
        docker("kill", self.container(rank))
        return moment


class Ours(Training):
    """Under `orchestrate`."""

    def __init__(self, *options: str) -> None:
        self.folder = tempfile.TemporaryDirectory()
        command = [sys.executable, "-m", "orchestrate", "run", "--gpus", "none", "--trainers", str(NODES - 1)]
        limits = ["--max-restarts", "1000000", "--set", "grace=5s", "--runs", self.folder.name, *options]
        script = ["--", "benchmarks/steps.py", "1000000"]
        self.process = subprocess.Popen(
            [*command, *limits, *script], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT
        )

    def tails(self) -> list[str]:
        """Read the logs in the run directory."""
        return ends(Path(self.folder.name).glob("*/logs/rank-*.log"), NODES)

    def container(self, rank: int) -> str:
        """Look up the container in the plan."""
        (path,) = Path(self.folder.name).glob("*/plan.json")
        node = json.loads(path.read_text())["workers"][rank]["node"]
        return f"{path.parent.name}-{'master-1' if node == 'master' else node}"

    def alive(self) -> bool:
        """Whether the orchestrator is running."""
        return self.process.poll() is None

    def end(self) -> None:
        """Stop the job with SIGINT, as Ctrl-C does."""
        self.process.send_signal(signal.SIGINT)
        self.process.wait()
        self.folder.cleanup()


class Torchrun(Training):
    """Under torchrun in four containers of a handwritten Compose file, with torchrun's own restarts."""

    def __init__(self) -> None:
        plain_image()
        self.project = f"peer-{os.getpid()}"
        self.folder = tempfile.TemporaryDirectory()
        file = Path(self.folder.name, "compose.yml")
        text = COMPOSE.replace("PROJECT", self.project)
        file.write_text(text.replace("examples/allreduce.py", "--max-restarts 100 benchmarks/steps.py 1000000"))
        self.compose = ["compose", "--project-name", self.project, "--file", str(file)]
        docker(*self.compose, "up", "--detach", "--scale", f"node={NODES}")

    def tails(self) -> list[str]:
        """Read the logs from the engine."""
        return [docker("logs", "--tail", "1000", self.container(rank)) for rank in range(NODES)]

    def container(self, rank: int) -> str:
        """The container by Compose's numbering."""
        return f"{self.project}-node-{rank + 1}"

    def kill_node(self, rank: int) -> float:
        """Send SIGKILL to a container other than the rendezvous host; start it again, which torchrun does not."""
        moment = super().kill_node(rank or NODES - 1)
        docker("start", self.container(rank or NODES - 1))
        return moment

    def alive(self) -> bool:
        """Whether all four containers are running."""
        return len(docker(*self.compose, "ps", "--quiet").split()) == NODES

    def end(self) -> None:
        """Remove the containers and the network."""
        docker(*self.compose, "down", "--timeout", "1")
        self.folder.cleanup()


def restarts(job: Training, kind: str, kills: int, pause: float = 1.0) -> tuple[list[float], int]:
    """Seconds of each restart, and the number that failed; if the job does not recover, all remaining kills count."""
    seconds: list[float] = []
    try:
        job.restarted(time.time(), [""] * NODES)
        for number in range(kills):
            time.sleep(pause)  # some training between kills, so it is not a crash loop
            before = job.pids()
            seconds.append(job.restarted(getattr(job, kind)(number % NODES), before))
    except TimeoutError:
        pass
    finally:
        job.end()
    return seconds, kills - len(seconds)


def measure(runs: int) -> dict[str, Any]:
    """Kill ten workers per run under orchestrate, and one under torchrun."""
    seconds, lost = restarts(Ours(), "kill_worker", 10 * runs)
    ordered = sorted(seconds)
    values = {"orchestrate": (seconds, "s")}
    theirs = [restarts(Torchrun(), "kill_worker", 1) for _ in range(runs)]
    if any(found for found, _ in theirs):
        values["torchrun, if it recovered"] = [second for found, _ in theirs for second in found], "s"
    ratios = {
        "median, in seconds (≤ 0.2)": statistics.median(ordered),
        "95th percentile, in seconds (≤ 0.4)": ordered[int(0.95 * (len(ordered) - 1))],
        f"jobs lost in {len(seconds) + lost} kills (≤ 0)": float(lost),
        f"jobs lost by torchrun in {runs} kills": float(sum(failed for _, failed in theirs)),
    }
    return {"values": values, "ratios": ratios}
