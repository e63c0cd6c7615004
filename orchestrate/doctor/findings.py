"""Findings of `doctor`."""

from __future__ import annotations

from orchestrate.dataclass import dataclass
from orchestrate.errors import ResourceError

GOOD, WARNING, BAD = "ok", "warning", "error"


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    state: str  # ok, warning or error
    what: str
    hint: str = ""
    code: int = ResourceError.exit_code  # exit code of the command, if this is an error
