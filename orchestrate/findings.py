"""What `doctor` reports, and what local processes need, which is looked at without Docker's SDK."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib import metadata

from orchestrate.errors import ResourceError

GOOD, WARNING, BAD = "ok", "warning", "error"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    state: str  # ok, warning or error
    what: str
    hint: str = ""
    code: int = ResourceError.exit_code  # of the command, if this is an error


def local() -> Finding:
    """Whether local processes find torch."""
    try:
        return Finding(GOOD, f"local processes: torch {metadata.version('torch')} in {sys.executable}")
    except metadata.PackageNotFoundError:
        hint = f"{sys.executable} -m pip install torch"
        return Finding(WARNING, f"local processes: torch is not installed in {sys.executable}", hint)
