"""Run benchmarks and print their tables.

    python -m benchmarks checkpoint     one; --help lists them
    python -m benchmarks                all that need Docker
    python -m benchmarks gpu            all that need a GPU
    python -m benchmarks --json FILE    also write the results to FILE, replacing those of the same names
    python -m benchmarks --compare A B  compare the results in two such files
    python -m benchmarks soak           training under random faults; see python -m benchmarks soak --help
    python -m benchmarks jobs           thousands of jobs on one cluster; see python -m benchmarks jobs --help

Every figure is the median of interleaved runs, with its range (lowest to highest); ratios carry over to other
machines, times do not.
"""

import argparse
import datetime
import importlib
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.starts import ROOT
from orchestrate.errors import FAILED, ResourceError

ON_DOCKER = (
    "cold-start",
    "warm-start",
    "restart",
    "node-loss",
    "steady-state",
    "speed-up",
    "many-nodes",
    "slurm",
    "log-lines",
    "checkpoint",
    "time-to-accuracy",
    "commands",
    "image-rebuild",
)
ON_GPUS = tuple(
    f"gpu-{name}" for name in ("cold-start", "restart", "steady-state", "time-to-accuracy", "checkpoint", "bandwidth")
)
NAMES = (*ON_DOCKER, *ON_GPUS)


def printed(*command: str) -> str | None:
    """The output of a command, without the trailing newline; None if it fails or does not exist."""
    try:
        done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.rstrip("\n")


def commit() -> str:
    """The commit of this checkout, with `+ changes` if there are uncommitted changes; `unknown` without git."""
    name, changed = printed("git", "rev-parse", "--short=10", "HEAD"), printed("git", "status", "--porcelain")
    return "unknown" if not name else f"{name} + changes" if changed else name


def gpus(listing: str) -> dict[str, str]:
    """The GPUs by name and their driver, from the lines `NAME, DRIVER` of nvidia-smi; empty without lines."""
    rows = [line.rsplit(", ", 1) for line in listing.splitlines() if ", " in line]
    if not rows:
        return {}
    names = Counter(name for name, _ in rows)
    return {"GPUs": " + ".join(f"{number} × {name}" for name, number in names.items()), "driver": rows[0][1]}


def machine() -> dict[str, Any]:
    """The machine, the versions of its software, and the commit."""
    import torch

    found: dict[str, Any] = {
        "cpus": os.cpu_count(),
        "kernel": platform.release().partition("-")[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    listing = printed("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    if found_gpus := gpus(listing or ""):
        found |= found_gpus
        if torch.version.cuda:
            nccl = torch.cuda.nccl.version()
            found |= {"CUDA": torch.version.cuda, "NCCL": ".".join(map(str, nccl))}
    return found | {"commit": commit()}


def line(name: str, values: list[float], unit: str) -> str:
    """One row: name, median and range."""
    return f"  {name:<44}{statistics.median(values):>10.3f} {unit:<4} ({min(values):.3f} to {max(values):.3f})"


def measured(name: str, runs: int) -> tuple[dict[str, Any], bool]:
    """Run one benchmark and print its figures; returns the result, and whether the benchmark completed.

    An exception does not prevent the other benchmarks from running: the traceback goes to stderr.
    """
    about, completed = "", True
    try:
        module = importlib.import_module(f"benchmarks.{name.replace('-', '_')}")  # some need Docker's SDK
        about = (module.__doc__ or "").splitlines()[0]
        print(f"{name}: {about}", flush=True)
        result = module.measure(runs)
    except Exception as error:
        traceback.print_exc()
        completed, why = False, f"{type(error).__name__}: {error}".splitlines()[0][:200]
        result = {"values": {}, "ratios": {}, "failed": {name: why}}
    for what, (values, unit) in result["values"].items():
        print(line(what, values, unit))
    for what, ratio in result["ratios"].items():
        print(f"  {what:<44}{ratio:>10.3g}")
    for what, why in result.get("failed", {}).items():
        print(f"  {what} was not measured: {why}", flush=True)
    return {"about": about, **result}, completed


def compared(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    """Yield a row for each value that two files have: medians and their ratio, with `*` if the ranges are apart."""
    for name in [name for name in before if name in after]:
        values, others = before[name]["values"], after[name]["values"]
        for what in [what for what in values if what in others]:
            (one, unit), (two, _) = values[what], others[what]
            first, second = statistics.median(one), statistics.median(two)
            apart = max(one) < min(two) or max(two) < min(one)
            ratio = f"{second / first:.2f}" if first else "-"
            yield f"  {f'{name}: {what}':<64}{first:>10.3f} {second:>10.3f} {unit:<8} {ratio}{' *' * apart}"


def no_gpu() -> str:
    """Why torch cannot use a GPU here; empty if it can."""
    import torch

    if not torch.backends.cuda.is_built():
        return f"torch {torch.__version__} is built without CUDA"
    return "" if torch.cuda.is_available() else f"torch {torch.__version__} finds no usable GPU"


def main() -> int:
    """Run the benchmarks named on the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Run benchmarks side by side.")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"{', '.join(NAMES)}; gpu: all on GPUs; default: all others"
    )
    parser.add_argument("--runs", type=int, default=5, help="runs of each benchmark (default %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="add the results to FILE")
    parser.add_argument("--compare", type=Path, nargs=2, metavar="FILE", help="compare the results in two files")
    args = parser.parse_args()
    if args.compare:
        print("\n".join(compared(*(json.loads(path.read_text()) for path in args.compare))))
        return 0
    names = [one for name in args.names for one in (ON_GPUS if name == "gpu" else [name])]
    names = list(dict.fromkeys(names)) or [*ON_DOCKER]
    if unknown := set(names) - {*NAMES}:
        parser.error(f"unknown benchmark {', '.join(sorted(unknown))}; choose from {', '.join(NAMES)}")
    if (on_gpus := [name for name in names if name in ON_GPUS]) and (why := no_gpu()):
        print(f"error: {', '.join(on_gpus)} need{'s' * (len(on_gpus) == 1)} an NVIDIA GPU: {why}", file=sys.stderr)
        return ResourceError.exit_code
    here, date = machine(), datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    print(", ".join(f"{key} {value}" for key, value in here.items()))
    code = 0
    for name in names:
        result, completed = measured(name, args.runs)
        code = code if completed else FAILED
        if args.json:
            old = json.loads(args.json.read_text()) if args.json.exists() else {}
            new = {name: result | {"machine": here, "date": date}}
            args.json.write_text(json.dumps(old | new, indent=2) + "\n")
    return code


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what a benchmark has started is removed
    if sys.argv[1:2] == ["jobs"]:
        from benchmarks import many_jobs

        sys.exit(many_jobs.main(sys.argv[2:]))
    if sys.argv[1:2] == ["soak"]:
        from benchmarks import soak

        sys.exit(soak.main(sys.argv[2:]))
    sys.exit(main())
