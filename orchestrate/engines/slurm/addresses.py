"""Where nodes listen, as they have written it into a folder that all machines share."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from orchestrate.files.folder import content

HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


class Address(NamedTuple):
    """Where a node listens."""

    host: str  # Slurm's name of its machine
    port: int


def read(folder: Path, node: str, launch: str = "") -> Address | None:
    """Return the address of a node, of this launch if it is given; None if there is none.

    Workers can write to the folder, too: what they write leads to no connection, for which they lack the key.
    """
    try:
        of, host, port = content(folder / node).split()
        found = Address(host, int(port[:6]))
    except (OSError, ValueError):
        return None
    return found if launch in ("", of) and HOST.fullmatch(host) and 0 < found.port < 1 << 16 else None
