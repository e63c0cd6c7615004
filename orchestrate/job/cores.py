"""The cores of this machine, and which of them a worker keeps to."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from pathlib import Path

SYSTEM = Path("/sys/devices/system")
PCI = Path("/sys/bus/pci/devices")


def cores(system: Path = SYSTEM) -> tuple[int, ...]:
    """The numbers of the logical cores that this process may use, in an order in which neighbours share what they can.

    Linux numbers the second thread of each core after all first ones; here it follows the first, and the cores of one
    NUMA node stand together. Elsewhere the order is that of the numbers.
    """
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return tuple(sorted(usable, key=lambda core: (*_place(system, core), core)))


def shares(cores: tuple[int, ...], workers: int) -> list[tuple[int, ...]]:
    """Equal shares of neighbouring cores, one for each worker; what cannot be divided stays free."""
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
    """Equal shares of cores, one for each worker, out of those near its GPU.

    `near` has the cores near each worker's GPU. Where they are not known, overlap in part, or are too few, the shares
    are those of `shares`.
    """
    groups = {cores_near: [core for core in cores if core in cores_near] for cores_near in near}
    overlap = sum(map(len, groups.values())) > len({core for there in groups.values() for core in there})
    size = min((len(there) // near.count(group) for group, there in groups.items()), default=0)
    if not size or overlap:
        return shares(cores, len(near))
    left = {group: iter(there) for group, there in groups.items()}
    return [tuple(next(left[group]) for _ in range(size)) for group in near]


def _place(system: Path, core: int) -> tuple[int, int, int]:
    """The NUMA node, the package and the physical core of a logical one; zeros where the system does not say."""
    folder = system / "cpu" / f"cpu{core}"
    numbers = [min((int(node.name[4:]) for node in folder.glob("node[0-9]*")), default=0)]
    for name in ("physical_package_id", "core_id"):
        numbers.append(0)
        with contextlib.suppress(OSError, ValueError):
            numbers[-1] = int((folder / "topology" / name).read_text())
    return numbers[0], numbers[1], numbers[2]
