"""A real training under random faults: it must finish, with exactly the weights and samples of an undisturbed run.

    python -m benchmarks soak --faults 100 --seed 1 [--engine docker|process] [--trainers 2]

Each fault is injected at a random step, after the job has made new progress. Faults: a worker is killed or frozen; a
node is killed, removed, paused or cut off from the network; the orchestrator is killed; the disk is full.
"""

import argparse
import itertools
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from app.checkpoint import load
from orchestrate.host import private
from orchestrate.record.paths import JobPaths

STEPS_PER_EPOCH = 94  # with the default dataset and batch size
FAULT_INTERVAL = (10, 25)  # steps of progress between two faults
DISK_SIZE = 256 << 20  # bytes of the disk to fill; a checkpoint has 14 MB
PROGRESS_TIMEOUT = 180.0  # seconds for a job to recover from a fault


class Job:
    """A training under `orchestrate`, and faults to inject."""

    def __init__(self, engine: str, trainers: int, epochs: int, runs: Path) -> None:
        self.engine, self.runs = engine, runs
        self.log = runs.parent / f"{runs.name}.log"  # not on the disk that is filled
        script = ["-m", "app.train", "--model", "mnist", "--epochs", str(epochs), "--resume", "auto"]
        script += ["--save-every", "10", "--ledger"]
        options = ["--engine", engine, "--gpus", "none", "--trainers", str(trainers), "--max-restarts", "1000000"]
        options += ["--set", "hang_after=6s", "--set", "grace=5s", "--runs", str(runs), "--name", "soak"]
        self.orchestrator = self.start("run", *options, "--", *script)
        while not (found := list(runs.glob("soak-*"))):
            time.sleep(0.05)
        self.run = found[0]

    def start(self, *arguments: str) -> "subprocess.Popen[bytes]":
        """Start an orchestrator in the background."""
        with self.log.open("ab") as log:
            return subprocess.Popen([sys.executable, "-m", "orchestrate", *arguments], stdout=log, stderr=log)

    def events(self, name: str) -> list[dict[str, Any]]:
        """The events called `name` so far."""
        found = []
        for line in (self.run / "events.jsonl").read_text().splitlines():
            try:
                event = json.loads(line)
            except ValueError:
                continue
            found += [event] if event["event"] == name else []
        return found

    def step(self) -> int:
        """The furthest step so far."""
        try:
            return max(map(int, re.findall(r'"step": (\d+)', (self.run / "metrics.jsonl").read_text())), default=0)
        except OSError:
            return 0

    def ended(self) -> bool:
        """Whether the job has ended."""
        return (self.run / "report.json").exists()

    def until(self, condition: Any) -> None:
        """Wait until `condition()` is true or the job has ended."""
        deadline = time.monotonic() + PROGRESS_TIMEOUT
        while not condition() and not self.ended():
            if self.orchestrator.poll() not in (None, -signal.SIGKILL) and not self.ended():
                raise SystemExit(f"the orchestrator ended: {self.log.read_text()[-3000:]}")
            if time.monotonic() > deadline:
                raise SystemExit(f"no progress in {PROGRESS_TIMEOUT:g} s: {self.log.read_text()[-3000:]}")
            time.sleep(0.02)

    # --- faults; each returns the expected cause, or an empty string if the job may continue without a restart

    def kill_worker(self, rank: int) -> str:
        """Send SIGKILL to a worker."""
        self.signal_worker(rank, signal.SIGKILL)
        return "killed"

    def freeze_worker(self, rank: int) -> str:
        """Send SIGSTOP to a worker."""
        self.signal_worker(rank, signal.SIGSTOP)
        return "hang"

    def kill_node(self, rank: int) -> str:
        """Send SIGKILL to the node's process 1."""
        if self.engine == "docker":
            self.docker("kill", self.container(rank))
            return "node stopped"
        os.kill(self.node_pid(rank), signal.SIGKILL)
        return "node lost"

    def remove_node(self, rank: int) -> str:
        """Force the removal of a container."""
        self.docker("rm", "-f", self.container(rank))
        return "node stopped"

    def pause_node(self, rank: int) -> str:
        """Pause a container for two seconds."""
        container = self.container(rank)
        self.docker("pause", container)
        time.sleep(2)
        self.docker("unpause", container)
        return ""

    def cut_off_node(self, rank: int) -> str:
        """Disconnect a container from the network."""
        self.docker("network", "disconnect", f"{self.run.name}_job", self.container(rank))
        return "partition"

    def kill_orchestrator(self, rank: int) -> str:
        """Kill the orchestrator, and attach a new one."""
        taken = len(self.events("taken_over")) + len(self.events("generation_starting"))
        self.orchestrator.kill()
        self.orchestrator.wait()
        time.sleep(random.random())
        self.orchestrator = self.start("attach", self.run.name, "--runs", str(self.runs))
        self.until(lambda: len(self.events("taken_over")) + len(self.events("generation_starting")) > taken)
        return ""

    def fill_disk(self, rank: int) -> str:
        """Fill the disk of the run directory for three seconds."""
        filler = self.runs / "filler"
        with filler.open("wb", buffering=0) as file:
            try:
                while file.write(b"x" * (1 << 16)):
                    pass
            except OSError:
                pass
        time.sleep(3)
        filler.unlink()
        return ""

    # --- helpers

    def docker(self, *arguments: str) -> str:
        """Run a `docker` command; return its output."""
        return subprocess.run(["docker", *arguments], check=True, capture_output=True, text=True).stdout

    def plan(self) -> dict[str, Any]:
        """The newest plan."""
        plan: dict[str, Any] = json.loads((self.run / "plan.json").read_text())
        return plan

    def container(self, rank: int) -> str:
        """The container of a rank."""
        node = self.plan()["workers"][rank]["node"]
        return f"{self.run.name}-{'master-1' if node == 'master' else node}"

    def node_pid(self, rank: int) -> int:
        """The process ID of a rank's node."""
        end = f"/{self.run.name}/{self.plan()['workers'][rank]['node']}.sock"
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                variables = folder.joinpath("environ").read_bytes().split(b"\0")
                command = folder.joinpath("cmdline").read_bytes()
            except OSError:
                continue
            socket = any(entry.startswith(b"NODE_SOCKET=") and entry.endswith(end.encode()) for entry in variables)
            if socket and command.rstrip(b"\0").endswith(b"orchestrate/node"):
                return int(folder.name)
        raise SystemExit(f"no node of rank {rank}")

    def signal_worker(self, rank: int, number: int) -> None:
        """Send a signal to a worker only."""
        if self.engine == "docker":
            script = (
                "import glob, os\nfor path in glob.glob('/proc/[0-9]*/cmdline'):\n"
                "    argv = open(path, 'rb').read().split(b'\\0')\n"
                f"    if argv[1:4] == [b'-u', b'-m', b'app.train']: os.kill(int(path.split('/')[2]), {int(number)})"
            )
            self.docker("exec", self.container(rank), "python", "-c", script)
        else:
            parent = str(self.node_pid(rank))
            for path in Path("/proc").glob("[0-9]*/stat"):
                try:
                    fields = path.read_text().rpartition(")")[2].split()
                except OSError:
                    continue
                if fields[1] == parent:
                    os.kill(int(path.parent.name), number)


def ledger(run: Path) -> dict[int, list[int]]:
    """By step: the samples of all workers, in the last generation that took the step."""
    steps: dict[int, dict[int, list[int]]] = {}
    for path in run.glob("job/ledger-*.jsonl"):
        for line in path.read_text().splitlines():
            try:
                entry = json.loads(line)
            except ValueError:
                continue  # truncated by a kill or the full disk
            steps.setdefault(entry["step"], {}).setdefault(entry["generation"], []).extend(entry["samples"])
    return {step: sorted(found[max(found)]) for step, found in sorted(steps.items())}


def losses(run: Path) -> dict[int, float]:
    """By step: the loss in the last generation that took the step."""
    found = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        try:
            values = json.loads(line)
        except ValueError:
            continue
        if values.get("kind") == "step":
            found[values["step"]] = values["loss"]
    return found


def first_difference(one: dict[int, Any], other: dict[int, Any]) -> int | str:
    """The first step at which two runs differ."""
    return min((step for step in one if one[step] != other.get(step)), default="none")


def executed(run: Path) -> int:
    """Number of steps rank 0 has taken, including lost ones."""
    return (run / "job" / "ledger-0.jsonl").read_text().count("\n")


def undisturbed(args: argparse.Namespace, epochs: int, runs: Path) -> Job:
    """Run the same job without faults."""
    job = Job(args.engine, args.trainers, epochs, runs)
    code = job.orchestrator.wait()
    if code:
        raise SystemExit(job.log.read_text()[-3000:])
    return job


def disturbed(args: argparse.Namespace, epochs: int, runs: Path, small: bool) -> tuple[Job, list[tuple[str, str, str]]]:
    """Run the job under faults; returns it, and the kind, expected cause and reported cause of each fault."""
    kinds = ["kill_worker", "kill_node", "freeze_worker", "kill_orchestrator"] + ["fill_disk"] * small
    kinds += ["remove_node", "pause_node", "cut_off_node"] if args.engine == "docker" else []
    job = Job(args.engine, args.trainers, epochs, runs)
    faults: list[tuple[str, str, str]] = []
    for number, kind in zip(range(args.faults), itertools.cycle(random.sample(kinds, len(kinds)))):
        target = job.step() + random.randint(*FAULT_INTERVAL)
        job.until(lambda target=target: job.step() >= target)
        if job.ended():
            break
        time.sleep(random.random() / 2)
        before = job.step()
        generations = len(job.events("generation_ended"))
        cause = getattr(job, kind)(random.randint(0, args.trainers))
        if cause:
            job.until(lambda count=generations: len(job.events("generation_ended")) > count)
        job.until(lambda before=before: job.step() > before)
        ended = job.events("generation_ended")[generations:]
        found = ended[0]["cause"]["cause"] if ended and ended[0]["cause"] else ""
        faults.append((kind, cause, found))
        print(f"  {number + 1:>3}. at step {before:>5}: {kind:<18} {found or 'no restart'}", flush=True)
    job.until(lambda: False) if not job.ended() else None
    job.orchestrator.wait()
    return job, faults


def left(job: Job) -> list[str]:
    """Sockets, containers, networks and volumes that the job left behind."""
    sockets = (private.temporary() / job.run.name, JobPaths(job.run).sockets)
    found = [f"sockets {path}" for path in sockets if path.exists()]
    if job.engine == "docker":
        label = f"label=orchestrate.job={job.run.name}"
        for what in (("ps", "-aq"), ("network", "ls", "-q"), ("volume", "ls", "-q")):
            found += job.docker(*what, "--filter", label).split()
    return found


def main(arguments: list[str]) -> int:
    """Run the soak test; returns 0 if it passes, otherwise 1."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks soak", description="Train under random faults.")
    parser.add_argument("--faults", type=int, default=100, help="number of faults (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the faults (default %(default)s)")
    parser.add_argument("--engine", choices=["docker", "process"], default="docker", help="default %(default)s")
    parser.add_argument("--trainers", type=int, default=2, help="nodes besides the master (default %(default)s)")
    args = parser.parse_args(arguments)
    random.seed(args.seed)
    epochs = max(1, math.ceil(args.faults * (FAULT_INTERVAL[1] + 15) / STEPS_PER_EPOCH))
    with tempfile.TemporaryDirectory() as folder:
        disk = Path(folder, "disk")
        disk.mkdir()
        Path(folder, "calm").mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_SIZE}", "tmpfs", str(disk)]
        small = subprocess.run(mount, capture_output=True).returncode == 0
        print(f"{epochs} epochs; the disk is {'' if small else 'not '}filled" + ("" if small else ": that needs root"))
        try:
            calm = undisturbed(args, epochs, Path(folder, "calm"))
            job, faults = disturbed(args, epochs, disk, small)
            report = json.loads((job.run / "report.json").read_text())
            one, other = (load(path / "checkpoints" / "last")[0]["model"] for path in (calm.run, job.run))
            reference = json.loads((calm.run / "report.json").read_text())
            causes = [(cause, found) for _, cause, found in faults if cause]
            shown = {
                "outcome": report["outcome"],
                "faults": len(faults),
                "faults by kind": dict(Counter(kind for kind, _, _ in faults)),
                "causes reported correctly": f"{sum(found == cause for cause, found in causes)} of {len(causes)}",
                "generations": report["generations"],
                "weights are bit-identical": all(torch.equal(one[name], other[name]) for name in one),
                "first loss that differs": first_difference(losses(calm.run), losses(job.run)),
                "sample ledger is exact": ledger(calm.run) == ledger(job.run),
                "left behind": left(job) or "nothing",
                "seconds": round(report["duration_s"], 1),
                "seconds undisturbed": round(reference["duration_s"], 1),
                "time in useful steps": f"{reference['duration_s'] / report['duration_s']:.0%}",
                "steps that were kept": f"{executed(calm.run) / executed(job.run):.0%}",
            }
        finally:
            if small:
                subprocess.run(["umount", "--lazy", str(disk)], check=False)
    for what, value in shown.items():
        print(f"  {what:<28}{value}")
    good = shown["weights are bit-identical"] and shown["sample ledger is exact"] and shown["left behind"] == "nothing"
    return 0 if good and report["outcome"] == "succeeded" and len(faults) == args.faults else 1
