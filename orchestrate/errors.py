"""Everything that can go wrong before or around a job, each with an exit code and a hint.

The tree:

    OrchestrateError          1
    ├── UsageError            2   the command line or the job file asks for what cannot be
    ├── EngineError           3   the engine does not answer, or refuses
    │   └── EngineLost        3   it does not answer at all
    └── ResourceError         4   the engine answers but lacks something: an image, GPUs, Compose
"""

from __future__ import annotations

SUCCEEDED = 0
FAILED = 1  # a worker failed
LOST = 5  # the engine does not answer any more, and nobody knows how the job ended
TIMED_OUT = 124  # --max-run was over; as coreutils' timeout
INTERRUPTED = 130  # stopped by a person; as shells say after Ctrl-C


class OrchestrateError(Exception):
    """What happened and why (`str(error)`), and what to do next (`hint`)."""

    exit_code = FAILED

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class UsageError(OrchestrateError):
    """The request itself is wrong."""

    exit_code = 2


class EngineError(OrchestrateError):
    """The engine cannot be reached, or refuses what it is asked."""

    exit_code = 3


class EngineLost(EngineError):
    """The engine does not answer at all; it may come back."""


class ResourceError(OrchestrateError):
    """The engine lacks something that the job needs."""

    exit_code = 4
