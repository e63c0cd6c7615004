"""Commands that answer at once: from the command to its exit, in a folder with one job, and with ten thousand."""

import os
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.starts import ROOT, timed

MANY = 10_000


def start(folder: str, *arguments: str) -> float:
    """Seconds until Python with these arguments has exited; in a folder."""
    options: dict[str, Any] = {"env": os.environ | {"PYTHONPATH": str(ROOT)}, "cwd": folder}
    return timed(partial(subprocess.run, [sys.executable, *arguments], check=True, capture_output=True, **options))


def fill(runs: Path, job: Path) -> None:
    """Add many jobs to a folder, as links to the files of one, which ended long ago."""
    os.utime(job / "report.json", (0, 0))
    for number in range(MANY):
        folder = runs / f"job-{number:05x}"
        folder.mkdir()
        for file in job.iterdir():
            if file.is_file():
                os.link(file, folder / file.name)


def measure(runs: int) -> dict[str, Any]:
    """Interleave all commands with a bare interpreter."""
    with tempfile.TemporaryDirectory() as top:
        Path(top, "hello.py").write_text("print('hello')\n")
        ways = {"python -c pass": ["-c", "pass"], "--help": ["-m", "orchestrate", "--help"]}
        for jobs, note in ((1, ""), (MANY, f" with {MANY:,} jobs")):
            folder = Path(top, str(jobs))
            options = ["--engine", "process", "--trainers", "0", "--name", "job", "--runs", str(folder)]
            start(top, "-m", "orchestrate", "run", *options, "--", "hello.py")
            (job,) = folder.glob("job-*")
            if note:
                fill(folder, job)
            for command in ("ps", "logs", "events"):
                names = [] if command == "ps" else [job.name]
                ways[command + note] = ["-m", "orchestrate", command, *names, "--runs", str(folder)]
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(2 * runs + 1):
            for name, way in ways.items():
                took = start(top, *way)
                seconds[name] += [took] if number else []  # the first one fills caches
    limits = {name: 0.09 if name == "--help" else 0.3 if " with " in name else 0.15 for name in [*ways][1:]}
    ratios = {f"{name}, in seconds (≤ {limit})": statistics.median(seconds[name]) for name, limit in limits.items()}
    return {"values": {name: (times, "s") for name, times in seconds.items()}, "ratios": ratios}
