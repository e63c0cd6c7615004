"""Run benchmarks and print their tables.

    python -m benchmarks T9             one
    python -m benchmarks                all
    python -m benchmarks --json FILE    and write what was measured, in place of what stood there of the same name
    python -m benchmarks soak           a training under faults; see --help of it

Every figure is a median of interleaved runs with its spread (lowest to highest); ratios carry to other machines,
times do not.
"""

import argparse
import json
import os
import platform
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks import soak, t1, t2, t3, t4, t5, t6, t7, t8, t9, t10, t11, t12

ALL = dict(zip([f"T{number}" for number in range(1, 13)], [t1, t2, t3, t4, t5, t6, t7, t8, t9, t10, t11, t12]))


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "cpus": os.cpu_count(),
        "kernel": platform.release().partition("-")[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def line(name: str, values: list[float], unit: str) -> str:
    """A row: what, the median, the spread."""
    return f"  {name:<44}{statistics.median(values):>10.3f} {unit:<4} ({min(values):.3f} to {max(values):.3f})"


def main() -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure, side by side.")
    parser.add_argument("names", nargs="*", metavar="T1 … T12")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    unknown = set(args.names) - set(ALL)
    if unknown:
        parser.error(f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(ALL)}")
    measured: dict[str, Any] = {"machine": machine()}
    print(", ".join(f"{key} {value}" for key, value in measured["machine"].items()))
    for name in args.names or ALL:
        print(f"{name}: {(ALL[name].__doc__ or '').splitlines()[0]}", flush=True)
        result = ALL[name].measure(args.runs)
        for what, (values, unit) in result["values"].items():
            print(line(what, values, unit))
        for what, ratio in result["ratios"].items():
            print(f"  {what:<44}{ratio:>10.3g}")
        for what, why in result.get("failed", {}).items():
            print(f"  {what} was not measured: {why}")
        measured[name] = {"about": (ALL[name].__doc__ or "").splitlines()[0], **result}
        if args.json:
            before = json.loads(args.json.read_text()) if args.json.exists() else {}
            args.json.write_text(json.dumps(before | measured, indent=2) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["soak"]:
        sys.exit(soak.main(sys.argv[2:]))
    main()
