"""Limits of a node, which keep the nodes of a job from overloading their machine. Pure."""

from __future__ import annotations

from orchestrate.dataclass import dataclass
from orchestrate.spec.sizes import UNLIMITED, parse_size

# Bytes of memory reserved for everything else on a machine; a tenth of its memory if that is more.
RESERVED_MEMORY = 1 << 30
MIN_MEMORY = 512 << 20  # bytes of memory that a node gets at least by default, whatever the number of nodes
TMP = 2 << 30  # bytes of /tmp if a node's share of memory is unknown, as in docker-compose.yml
PROCESSES, MIN_PROCESSES = 16384, 512  # for all nodes together, and the minimum for each node


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a node; `memory` is in bytes, or 0 if unlimited."""

    memory: int
    tmp: int  # bytes of its memory that files in /tmp may use
    processes: int


def limits(asked: str | None, machine: int, nodes: int) -> Limits:
    """Limits of each of `nodes` nodes on a machine with `machine` bytes of memory (0: unknown).

    `asked` is a job's `memory`; None means an equal share of the memory that is not reserved.
    """
    share = max(MIN_MEMORY, (machine - max(RESERVED_MEMORY, machine // 10)) // nodes) if machine else 0
    memory = share if asked is None else 0 if asked == UNLIMITED else parse_size(asked)
    return Limits(memory=memory, tmp=(memory or share) // 2 or TMP, processes=max(MIN_PROCESSES, PROCESSES // nodes))
