"""The interface of an engine, where nodes run. An engine does as it is asked: it prints nothing and decides nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from orchestrate.errors import UsageError
from orchestrate.files.paths import NAME, NODES, JobPaths
from orchestrate.job.outcomes import Doing, WorkerExit
from orchestrate.job.plan import Inventory, Plan, WorkerPlan
from orchestrate.job.spec import JobSpec

SWARMS = ("encrypt", "constraints", "volume")  # keys of a job file that only Swarm supports


@dataclass(frozen=True)
class JobState:
    """A job or a cluster whose nodes exist, as `ps` shows it."""

    job_id: str
    engine: str
    nodes: int
    run: Path  # the folder that nodes mount
    owner: int  # the user id of the account that started it

    @property
    def paths(self) -> JobPaths:
        """The paths of its files; its nodes mount a folder in the run directory."""
        return JobPaths(self.run.parent)

    @property
    def named(self) -> bool:
        """Whether its run directory has its name, as that of every job has."""
        return NAME.fullmatch(self.job_id) is not None and self.run.parent.name == self.job_id

    @property
    def cluster(self) -> bool:
        """Whether the nodes are those of a cluster."""
        return self.run.name == NODES


def ignoring(spec: JobSpec, keys: Iterable[str], engine: str) -> str:
    """A note on the keys of the job file that an engine does not support; empty if none of them is set.

    Raises UsageError for one that is set, and is not among the optional ones.
    """
    found = [key for key in keys if getattr(spec, key) != getattr(JobSpec(), key)]
    if needed := [key for key in found if key not in spec.optional]:
        raise UsageError(
            f"{engine} does not support {', '.join(needed)}",
            f"remove it, or mark it as optional: --set optional={','.join(found)}",
        )
    return f", ignoring {', '.join(found)}" if found else ""


def never() -> bool:
    """A `stopped` for callers that are never asked to stop."""
    return False


class Engine(Protocol):
    """What the supervisor and the commands need from an engine.

    All methods may raise EngineError, and EngineLost if the engine does not answer at all.
    """

    name: str  # as in a job file

    def inventory(self, spec: JobSpec, run: Path, prepare: bool) -> Inventory:
        """Check that the engine can run `spec` and say what it has; `prepare`: build or pull a missing image."""

    def port(self, spec: JobSpec, generation: int) -> int:
        """A port for rank 0 of a generation, other than that of the previous generation."""

    def up(self, spec: JobSpec, plan: Plan, run: Path, stopped: Callable[[], bool] = never) -> None:
        """Bring up the nodes of `plan`; healthy ones are kept, others are replaced.

        Also raises EngineError soon after `stopped()`: pulling an image, for example, may take long.
        """

    def warmed(self, nodes: Iterable[str], patience: float) -> bool:
        """Wait until nodes have imported what workers will need; False if some have not within `patience` seconds."""

    def alive(self) -> set[str]:
        """The nodes on which workers can start."""

    def host(self, node: str) -> str:
        """The name of the machine that a node was last seen on; empty if all nodes are on this machine."""

    def adopt(self, spec: JobSpec, plan: Plan, run: Path) -> set[int]:
        """Take over the workers of `plan` that run already; return the ranks that their nodes do not know."""

    def gather(self, stopped: Callable[[], bool]) -> None:
        """Copy all files of workers on other machines to the job's folder, or until `stopped()`.

        Raises OSError if the disk is full.
        """

    def start(self, workers: tuple[WorkerPlan, ...], command: tuple[str, ...]) -> None:
        """Start the workers, rank 0 first; one that cannot start counts as ended. Forget earlier workers."""

    def starting(self) -> set[int]:
        """The ranks of the workers that have not started yet: their nodes are importing modules, for example."""

    def wait(self, timeout: float) -> list[WorkerExit]:
        """The workers that have ended since the last call, in order; waits `timeout` seconds at most."""

    def explain(self, end: WorkerExit, node: str) -> str:
        """The cause of a worker's end, from `outcomes.CAUSES`; empty if only its exit code is known."""

    def troubles(self) -> dict[str, str]:
        """The nodes that are `paused` or `silent`, or cut off from the network (`partition`)."""

    def warnings(self) -> list[str]:
        """Warnings about the nodes, each returned once."""

    def doing(self) -> dict[int, Doing]:
        """What the running workers are doing, as far as their nodes say."""

    def dump(self) -> None:
        """Make all workers print their stacks, and abort."""

    def stop(self, kill: bool) -> None:
        """Ask all workers to stop; the nodes kill them after the grace period, or at once."""

    def discard(self, nodes: Iterable[str]) -> None:
        """Remove nodes by force, if their workers do not end."""

    def down(self, grace: float, stopped: Callable[[], bool] = never) -> None:
        """Remove everything that `up` has made, even if it failed half-way; nodes get `grace` seconds to end.

        Files that are elsewhere are copied to the job's folder first, until `stopped()`. Raises EngineError if that is
        not complete, and keeps the nodes.
        """

    def jobs(self) -> list[JobState]:
        """The jobs that have nodes here."""

    def holds(self, job_id: str) -> list[str]:
        """Descriptions of everything that `remove` would remove."""

    def remove(self, job_id: str, grace: float) -> None:
        """Stop and remove the nodes of a job whose orchestrator has gone, with all that belongs to them."""
