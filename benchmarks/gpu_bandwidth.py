"""Bus bandwidth of all_reduce by size: NCCL between GPUs, or gloo between two ranks on a single GPU."""

import json
import re
import tempfile
from typing import Any

from benchmarks import gpu

LARGEST = {"nccl": 1 << 30, "gloo": 1 << 26}  # bytes
UNITS = ("GB", 1 << 30), ("MB", 1 << 20), ("KB", 1 << 10)


def shown(size: int) -> str:
    """A size in the largest unit that divides it: 1 KB, 64 MB."""
    name, unit = next((name, unit) for name, unit in UNITS if size % unit == 0)
    return f"{size // unit} {name}"


def measure(runs: int) -> dict[str, Any]:
    """Run one job, which measures each size `runs` times."""
    ranks = gpu.group()
    options = (*gpu.ALL, "--trainers", "0") if ranks.backend == "nccl" else ranks.options  # one node, for NVLink
    script = ["benchmarks/gpu_allreduce.py", gpu.DEVICE, ranks.backend, str(LARGEST[ranks.backend]), str(runs)]
    with tempfile.TemporaryDirectory() as folder:
        command = gpu.orchestrate("run", *options, "--runs", folder, "--", *script)
        text = gpu.output(command, gpu.environment(ranks.ranks))
    found = [json.loads(line) for line in re.findall(r'(\{"bytes": .*\})', text)]
    values = {f"{ranks.about}: {shown(one['bytes'])}": one["bandwidth"] for one in found}
    return gpu.result(values, "GB/s", {}, gpu.without_nccl(ranks))
