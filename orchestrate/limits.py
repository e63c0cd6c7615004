"""The limits of a node, by which all nodes of a job together leave their machine alive. Pure."""

from __future__ import annotations

from dataclasses import dataclass

UNLIMITED = "unlimited"  # for a job's `memory`
UNITS = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
KEPT = 1 << 30  # bytes of memory that a machine keeps for everything else; a tenth of its memory where that is more
LEAST = 512 << 20  # bytes of memory that a node gets by default, however many there are
TMP = 2 << 30  # bytes of /tmp where a node's share of the memory is not known, as in docker-compose.yml
PROCESSES, FEWEST = 16384, 512  # of all nodes together; of a node, however many there are


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a node may use at most, in bytes; `memory` is 0 where it is not limited."""

    memory: int
    tmp: int  # of its memory, for files in /tmp
    processes: int


def limits(asked: str | None, machine: int, nodes: int) -> Limits:
    """The limits of each of `nodes` nodes on a machine that has so many bytes of memory (0: not known).

    `asked` is a job's `memory`; None stands for a node's share of what the machine can do without.
    """
    share = max(LEAST, (machine - max(KEPT, machine // 10)) // nodes) if machine else 0
    memory = share if asked is None else 0 if asked == UNLIMITED else size(asked)
    return Limits(memory=memory, tmp=(memory or share) // 2 or TMP, processes=max(FEWEST, PROCESSES // nodes))


def size(text: str) -> int:
    """Docker's `4g` in bytes."""
    return int(text.rstrip("bkmgBKMG")) * UNITS[text.lstrip("0123456789").lower()]


def in_words(count: int) -> str:
    """Bytes as `5.2 GiB` or `512 MiB`."""
    number, unit = (count / (1 << 30), "GiB") if count >= 1 << 30 else (count / (1 << 20), "MiB")
    return f"{f'{number:.1f}'.removesuffix('.0')} {unit}"
