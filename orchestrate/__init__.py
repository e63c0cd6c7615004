"""Run any PyTorch distributed program as a real multi-node job in containers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestrate.api.job import Cluster as cluster
    from orchestrate.api.job import Job, JobFailed, Result, run, submit
    from orchestrate.errors import OrchestrateError

__version__ = "0.1.0"
__all__ = ["Job", "JobFailed", "OrchestrateError", "Result", "cluster", "run", "submit"]


def __getattr__(name: str) -> Any:
    """Import what is used: `import orchestrate` takes no time."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from orchestrate import errors
    from orchestrate.api import job

    return getattr(errors if name == "OrchestrateError" else job, "Cluster" if name == "cluster" else name)
