"""The cores of this machine, and which of them a worker keeps to."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

SYSTEM = Path("/sys/devices/system")


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


def _place(system: Path, core: int) -> tuple[int, int, int]:
    """The NUMA node, the package and the physical core of a logical one; zeros where the system does not say."""
    folder = system / "cpu" / f"cpu{core}"
    numbers = [min((int(node.name[4:]) for node in folder.glob("node[0-9]*")), default=0)]
    for name in ("physical_package_id", "core_id"):
        numbers.append(0)
        with contextlib.suppress(OSError, ValueError):
            numbers[-1] = int((folder / "topology" / name).read_text())
    return numbers[0], numbers[1], numbers[2]
