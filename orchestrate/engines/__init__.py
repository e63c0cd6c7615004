"""Engine: where nodes live. An engine does as it is told; it never prints and never decides."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from orchestrate.plan import Inventory, Plan, WorkerPlan
from orchestrate.spec import JobSpec


@dataclass(frozen=True)
class Exit:
    """The end of a worker."""

    rank: int
    code: int  # 128 + n where signal n ended it


@dataclass(frozen=True)
class JobState:
    """A job whose nodes exist, as `ps` shows it."""

    job_id: str
    engine: str
    nodes: int
    run: Path


class Engine(Protocol):
    """What the supervisor and the commands ask of a place where nodes live; all may raise EngineError."""

    def inventory(self, spec: JobSpec, run: Path, prepare: bool) -> Inventory:
        """Check that the engine can run `spec` and say what it has; `prepare`: build or pull a missing image."""

    def up(self, spec: JobSpec, plan: Plan, run: Path) -> None:
        """Bring up the nodes of `plan`, with the run directory `run`; raises EngineError."""

    def start(self, workers: tuple[WorkerPlan, ...], command: tuple[str, ...]) -> None:
        """Start the workers, rank 0 first."""

    def wait(self, timeout: float) -> list[Exit]:
        """The workers that have ended since the last call, in order; at most `timeout` seconds pass."""

    def explain(self, end: Exit, node: str) -> str:
        """What is known of the end of a worker on `node` besides its code: `oom`, `node lost`, or nothing."""

    def stop(self, kill: bool) -> None:
        """Ask all workers to stop, and start no more; the nodes kill them after the grace period, or at once."""

    def down(self, grace: float) -> None:
        """Remove all that `up` made, also half of it; nodes get `grace` seconds to end. Raises EngineError."""

    def jobs(self) -> list[JobState]:
        """The jobs that have nodes here."""

    def remove(self, job_id: str, grace: float) -> None:
        """Stop and remove the nodes of a job that another orchestrator left."""
