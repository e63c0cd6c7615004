"""The limits of a node, so that all nodes of a job together do not overload their machine. Pure."""

from __future__ import annotations

from dataclasses import dataclass

UNLIMITED = "unlimited"  # a value of `memory`
UNITS = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
# Bytes of memory that a machine keeps for everything else; a tenth of its memory if that is more.
RESERVED_MEMORY = 1 << 30
MIN_MEMORY = 512 << 20  # bytes of memory that a node gets by default, however many there are
TMP = 2 << 30  # bytes of /tmp where a node's share of the memory is not known, as in docker-compose.yml
PROCESSES, MIN_PROCESSES = 16384, 512  # of all nodes together; at least this many for each node


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a node may use at most, in bytes; `memory` is 0 where it is not limited."""

    memory: int
    tmp: int  # bytes of its memory that files in /tmp may use
    processes: int


def limits(asked: str | None, machine: int, nodes: int) -> Limits:
    """The limits of each of `nodes` nodes on a machine with `machine` bytes of memory (0: unknown).

    `asked` is a job's `memory`; None means an equal share of the memory that the machine does not keep for itself.
    """
    share = max(MIN_MEMORY, (machine - max(RESERVED_MEMORY, machine // 10)) // nodes) if machine else 0
    memory = share if asked is None else 0 if asked == UNLIMITED else in_bytes(asked)
    return Limits(memory=memory, tmp=(memory or share) // 2 or TMP, processes=max(MIN_PROCESSES, PROCESSES // nodes))


def in_bytes(text: str) -> int:
    """Docker's `4g` in bytes."""
    return int(text.rstrip("bkmgBKMG")) * UNITS[text.lstrip("0123456789").lower()]


def in_words(count: int) -> str:
    """Bytes as `5.2 GiB` or `512 MiB`."""
    number, unit = (count / (1 << 30), "GiB") if count >= 1 << 30 else (count / (1 << 20), "MiB")
    return f"{f'{number:.1f}'.removesuffix('.0')} {unit}"
