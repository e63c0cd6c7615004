"""Errors before or around a job, each with an exit code and a hint.

OrchestrateError          1
├── UsageError            2   invalid command line or job file
├── EngineError           3   the engine does not respond, or refuses a request
│   ├── EngineLost        3   the engine does not respond at all
│   └── AllocationLost    3   a scheduler's allocation has too few machines left; another one may have enough
├── Unsupervised          5   a job has not ended, and nothing supervises it, so the outcome is unknown
├── StorageError          3   the object store refuses a request, or has no intact copy
│   └── StorageLost       3   the object store does not respond; it may come back
│       └── StorageBusy   3   the object store responds, but is overloaded or fails
└── ResourceError         4   the engine answers, but something is missing: an image, GPUs, Compose
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

SUCCEEDED = 0
FAILED = 1  # a worker failed
LOST = 5  # the engine stopped responding, so the outcome is unknown
TIMED_OUT = 124  # the time limit --max-run was reached; same as coreutils' timeout
INTERRUPTED = 130  # stopped by the user; same as shells after Ctrl-C


class OrchestrateError(Exception):
    """An error with its cause (`str(error)`) and a way to fix it (`hint`), and a file to print for that (`file`)."""

    exit_code = FAILED

    def __init__(self, message: str, hint: str = "", file: str = "") -> None:
        super().__init__(message)
        self.hint, self.file = hint, file
        if hint and sys.version_info >= (3, 11):
            self.add_note(f"hint: {hint}")  # which tracebacks show


class UsageError(OrchestrateError):
    """The command line or the job file is invalid."""

    exit_code = 2


class EngineError(OrchestrateError):
    """The engine cannot be reached, or refuses a request."""

    exit_code = 3


class EngineLost(EngineError):
    """The engine does not respond at all; it may come back."""


class AllocationLost(EngineError):
    """The allocation of a scheduler has too few machines left; another one may have enough."""


class Unsupervised(OrchestrateError):
    """A job has not ended, and nothing supervises it, so the outcome is unknown."""

    exit_code = LOST


class StorageError(OrchestrateError):
    """The object store refuses a request, or holds no intact copy of the files."""

    exit_code = 3


class StorageLost(StorageError):
    """The object store does not respond, or fails; it may come back."""


class StorageBusy(StorageLost):
    """The object store has answered that it is overloaded or fails: its address is right."""


class StorageRefused(StorageError):
    """Files that cannot be copied however often one tries: they are too many, or the store refuses each."""


class StorageConflict(StorageError):
    """What is in the way in the object store will not go away: another writer, or a link."""


class ResourceError(OrchestrateError):
    """Something that the job needs is missing: an image, GPUs, Compose."""

    exit_code = 4


def did_you_mean(word: str, known: Iterable[str], count: int = 1, cutoff: float = 0.65) -> str:
    """Return a hint with the known words that are most similar to a misspelled one, `count` at most; "" if none is.

    Dashes at the start do not count; `cutoff` is the similarity, from 0 to 1, that a word needs.
    """
    import difflib  # only here, for --help

    names = {name.lstrip("-"): name for name in known}
    matches = difflib.get_close_matches(word.lstrip("-"), names, count, cutoff)
    return f"did you mean {' or '.join(names[match] for match in matches)}?" if matches else ""
