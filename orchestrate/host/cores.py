"""CPU cores of this machine, and their assignment to workers."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from pathlib import Path

SYSTEM = Path("/sys/devices/system")
PCI = Path("/sys/bus/pci/devices")


def cores(system: Path = SYSTEM) -> tuple[int, ...]:
    """Logical cores that this process may use, ordered so that neighbors share caches and memory.

    Linux numbers the second thread of each core after all first ones; here it follows the first, and the cores of a
    NUMA node are adjacent. On other systems, cores are in numeric order.
    """
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return tuple(sorted(usable, key=lambda core: (*_topology(system, core), core)))


def shares(cores: tuple[int, ...], workers: int) -> list[tuple[int, ...]]:
    """Divide cores into equal shares of neighbors, one per worker; the remainder stays unused."""
    size = len(cores) // workers
    return [cores[worker * size : (worker + 1) * size] for worker in range(workers)]


def near(bus: str, pci: Path = PCI) -> tuple[int, ...]:
    """The logical cores of the NUMA node that a GPU is connected to; empty if the system does not report it.

    `bus` is its PCI address as `nvidia-smi` prints it, with a domain of eight digits; the kernel's has four.
    """
    match = re.fullmatch(r"(?:0000)?([0-9A-Fa-f]{4}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7])", bus)
    try:
        parts = (pci / match[1].lower() / "local_cpulist").read_text().split(",") if match else []
        ends = [[int(number) for number in part.split("-")] for part in parts]
    except (OSError, ValueError):
        return ()
    return tuple(core for each in ends for core in range(each[0], each[-1] + 1))


def shares_near(cores: tuple[int, ...], near: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Divide cores into equal shares, one per worker, near the worker's GPU.

    `near` lists the cores near each worker's GPU. If they are unknown, overlap partially or are too few, the result is
    that of `shares`.
    """
    groups = {cores_near: [core for core in cores if core in cores_near] for cores_near in near}
    overlap = sum(map(len, groups.values())) > len({core for members in groups.values() for core in members})
    size = min((len(members) // near.count(group) for group, members in groups.items()), default=0)
    if not size or overlap:
        return shares(cores, len(near))
    unused = {group: iter(members) for group, members in groups.items()}
    return [tuple(next(unused[group]) for _ in range(size)) for group in near]


def _topology(system: Path, core: int) -> tuple[int, int, int]:
    """NUMA node, package and physical core of a logical core; 0 for each that the system does not report."""
    folder = system / "cpu" / f"cpu{core}"
    numbers = [min((int(node.name[4:]) for node in folder.glob("node[0-9]*")), default=0)]
    for name in ("physical_package_id", "core_id"):
        numbers.append(0)
        with contextlib.suppress(OSError, ValueError):
            numbers[-1] = int((folder / "topology" / name).read_text())
    return numbers[0], numbers[1], numbers[2]
