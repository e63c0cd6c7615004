"""What an engine is. An engine does as it is asked: it prints nothing and decides nothing.

`Engine` is what any place can be asked for; `Session` is the nodes and workers of one job there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Protocol

from orchestrate.errors import UsageError
from orchestrate.files.paths import NAME, NODES, JobPaths
from orchestrate.job.outcomes import Doing, Reason, WorkerExit
from orchestrate.job.plan import Inventory, Placement, Plan
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


class Stop(Enum):
    """How workers are asked to end."""

    TERMINATE = "terminate"  # SIGTERM; their nodes kill them after the grace period
    KILL = "kill"  # SIGKILL, at once
    DUMP = "dump"  # all stand still, print their stacks, and abort


@dataclass(frozen=True)
class Observed:
    """What a session has found out since it was last asked."""

    exits: list[WorkerExit] = field(default_factory=list)  # the workers that have ended, in order
    starting: set[int] = field(default_factory=set)  # ranks that have not started yet: their nodes import modules, say
    troubles: dict[str, str] = field(default_factory=dict)  # nodes that are `paused`, `silent`, or cut off: `partition`


class Session(Protocol):
    """The nodes of one job, or those of its cluster, and its workers on them.

    All methods may raise EngineError, and EngineLost if the engine does not answer at all.
    """

    def up(self, plan: Plan, stopped: Callable[[], bool] = never) -> None:
        """Bring up the nodes of `plan`; healthy ones are kept, others are replaced.

        Also raises EngineError soon after `stopped()`: pulling an image, for example, may take long.
        """

    def alive(self) -> dict[str, str]:
        """The nodes on which workers can start, with the name of each one's machine; empty for this machine."""

    def warmed(self, nodes: Iterable[str], patience: float) -> bool:
        """Wait until nodes have imported what workers will need; False if some have not within `patience` seconds."""

    def adopt(self, plan: Plan) -> set[int]:
        """Take over the workers of `plan` that run already; return the ranks that their nodes do not know."""

    def gather(self, stopped: Callable[[], bool]) -> None:
        """Copy all files of workers on other machines to the job's folder, or until `stopped()`.

        Raises OSError if the disk is full.
        """

    def start(self, plan: Plan) -> None:
        """Start the workers of `plan`, rank 0 first; one that cannot start counts as ended. Forget earlier workers."""

    def wait(self, timeout: float) -> Observed:
        """What has happened to the workers and their nodes; waits `timeout` seconds at most."""

    def doing(self) -> dict[int, Doing]:
        """What the running workers are doing, by rank, as far as their nodes say."""

    def explain(self, end: WorkerExit, node: str) -> Reason | None:
        """The cause of a worker's end; None if only its exit code is known."""

    def stop(self, how: Stop) -> None:
        """Ask all workers to end."""

    def discard(self, nodes: Iterable[str]) -> None:
        """Remove nodes by force, if their workers do not end."""

    def down(self, grace: float, stopped: Callable[[], bool] = never) -> None:
        """Remove everything that `up` has made, even if it failed half-way; nodes get `grace` seconds to end.

        Files that are elsewhere are copied to the job's folder first, until `stopped()`. Raises EngineError if that is
        not complete, and keeps the nodes.
        """


class Engine(Protocol):
    """A place where jobs can run.

    All methods may raise EngineError, and EngineLost if the engine does not answer at all.
    """

    name: str  # as in a job file

    def prepare(self, spec: JobSpec) -> None:
        """Have what the nodes of a job need: build or pull its image; raises ResourceError if that fails."""

    def inventory(self, spec: JobSpec, run: Path, look_inside: bool) -> tuple[Inventory, Placement]:
        """What the engine has for a job, and where the job goes if it has nodes of its own.

        Its nodes will see the folder `run`; `look_inside` allows to run its image.

        Raises ResourceError or UsageError for what keeps the job from running here.
        """

    def open(self, spec: JobSpec, plan: Plan, run: Path, warn: Callable[[str], None]) -> Session:
        """The nodes of a job, which exist already or not; `warn` is told what a user must know of them."""

    def jobs(self) -> list[JobState]:
        """The jobs that have nodes here."""

    def holds(self, job_id: str) -> list[str]:
        """Descriptions of everything that `remove` would remove."""

    def remove(self, job_id: str, grace: float) -> None:
        """Stop and remove the nodes of a job whose orchestrator has gone, with all that belongs to them."""
