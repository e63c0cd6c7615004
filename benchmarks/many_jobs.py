"""Thousands of jobs, one after another, on one cluster: nothing may grow.

    python -m benchmarks jobs --jobs 10000 [--engine docker|process]

Each job is a script that only imports torch, on one node. After each tenth of them, the ended jobs are removed, and
these are compared with the second tenth: seconds per job; memory, open files and number of the nodes' processes and of
this one, which starts the jobs; and bytes of what is left in the folder for jobs and in that of records.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from orchestrate import cluster
from orchestrate.host import private

PARTS = 10
GROWTH = 1.15  # of the last tenth to the second: the first one warms up what is imported and cached
NAMES = ("seconds", "memory", "files", "processes", "disk")


def tree(roots: set[int]) -> set[int]:
    """These processes and their descendants."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found = roots
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found = found | more
    return found


def nodes(engine: str, name: str) -> set[int]:
    """Process 1 of each node of a cluster."""
    if engine == "docker":
        ids = subprocess.run(
            ["docker", "ps", "-q", "--filter", f"label=orchestrate.job={name}"], stdout=subprocess.PIPE
        )
        inspect = ["docker", "inspect", "--format", "{{.State.Pid}}", *ids.stdout.decode().split()]
        return set(map(int, subprocess.run(inspect, check=True, stdout=subprocess.PIPE).stdout.split()))
    found = set()
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"/{name}/".encode() in path.read_bytes():
                found.add(int(path.parent.name))
        except OSError:
            continue
    return found


def memory(pid: int) -> int:
    """Bytes of a process that no other process has."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_"))


def size(folder: Path) -> int:
    """Bytes of the files in a folder, and one for each folder."""
    return sum(path.lstat().st_size if path.is_file() else 1 for path in folder.rglob("*"))


def state(roots: set[int], folders: list[Path]) -> list[float]:
    """What must not grow, besides seconds."""
    pids = tree(roots)
    files = sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids)
    return [sum(map(memory, pids)), files, len(pids), sum(map(size, folders))]


def main(arguments: list[str]) -> int:
    """Run the jobs; returns 0 if nothing has grown, otherwise 1."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks jobs", description="Run jobs one after another.")
    parser.add_argument("--jobs", type=int, default=10_000, help="number of jobs (default %(default)s)")
    parser.add_argument("--engine", choices=["docker", "process"], default="process", help="default %(default)s")
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        os.environ["XDG_STATE_HOME"] = f"{folder}/state"
        Path("code").mkdir()
        Path("code", "nothing.py").write_text("import torch\n")
        rows = []
        with cluster(engine=args.engine, trainers=0, gpus="none", chdir="code") as made:
            folders = [Path("runs"), Path("state"), *filter(Path.is_dir, [private.temporary()])]
            roots = nodes(args.engine, made.name) | {os.getpid()}
            for part in range(PARTS):
                seconds = []
                for _ in range(args.jobs // PARTS):
                    began = time.monotonic()
                    made.run("nothing.py", quiet=True)
                    seconds.append(time.monotonic() - began)
                prune = [sys.executable, "-m", "orchestrate", "prune", "--older-than", "0.001s"]
                subprocess.run(prune, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
                rows.append([statistics.median(seconds), *state(roots, folders)])
                values = ", ".join(f"{name} {value:.4g}" for name, value in zip(NAMES, rows[-1]))
                print(f"  {(part + 1) * args.jobs // PARTS:>6} jobs: {values}", flush=True)
        os.chdir("/")
    grown = [name for name, before, after in zip(NAMES, rows[1], rows[-1]) if after > before * GROWTH]
    print(f"  grown: {', '.join(grown) or 'nothing'}")
    return bool(grown)
