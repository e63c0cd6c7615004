"""Interfaces of an engine. Engines carry out requests; they print nothing and make no decisions.

`Engine` is a place where jobs can run; `Session` is the nodes and workers of one job there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import IO, NamedTuple, Protocol

from orchestrate.dataclass import dataclass, field
from orchestrate.errors import UsageError
from orchestrate.files.paths import NAME, NODES
from orchestrate.plan.plan import Inventory, Placement, Plan, WorkerPlan
from orchestrate.record.outcomes import Activity, Stack, WorkerExit
from orchestrate.record.paths import JobPaths
from orchestrate.spec.causes import Reason
from orchestrate.spec.spec import JobSpec

SWARMS = ("encrypt", "constraints", "volume")  # keys of a job file that only Swarm supports


@dataclass(frozen=True)
class JobState:
    """A job or cluster that has nodes, as shown by `ps`."""

    job_id: str
    engine: str
    nodes: int
    run: Path  # the folder that is mounted in nodes
    owner: int  # user ID of the account that started it

    @property
    def paths(self) -> JobPaths:
        """Paths of its files; nodes mount a folder in its run directory."""
        return JobPaths(self.run.parent)

    @property
    def named(self) -> bool:
        """Whether the run directory is named after the job, as for every job."""
        return NAME.fullmatch(self.job_id) is not None and self.run.parent.name == self.job_id

    @property
    def cluster(self) -> bool:
        """Whether this is a cluster."""
        return self.run.name == NODES


def ignoring(spec: JobSpec, keys: Iterable[str], engine: str) -> str:
    """Describe which unsupported keys of a job file are ignored; empty if none of `keys` is set.

    Raises UsageError if a key is set and not listed in `optional`.
    """
    found = [key for key in keys if getattr(spec, key) != getattr(JobSpec(), key)]
    if needed := [key for key in found if key not in spec.optional]:
        raise UsageError(
            f"{engine} does not support {', '.join(needed)}",
            f"remove it, or mark it as optional: --set optional={','.join(found)}",
        )
    return f", ignoring {', '.join(found)}" if found else ""


def never() -> bool:
    """Return False: a `stopped` for callers that cannot be interrupted."""
    return False


class Stop(Enum):
    """How to stop workers."""

    TERMINATE = "terminate"  # SIGTERM; nodes send SIGKILL after the grace period
    KILL = "kill"  # SIGKILL
    DUMP = "dump"  # freeze all workers, print their stacks, and abort them


@dataclass(frozen=True)
class Observed:
    """What has happened in a session since the previous call."""

    exits: list[WorkerExit] = field(default_factory=list)  # workers that have ended, in order
    starting: set[int] = field(default_factory=set)  # ranks that have not started, e.g. while nodes import modules
    troubles: dict[str, str] = field(default_factory=dict)  # by node: `paused`, `silent` or `partition` (cut off)


class Local(NamedTuple):
    """A command that this process can run."""

    words: list[str]
    env: Mapping[str, str]
    cwd: str | None = None
    files: tuple[IO[bytes], ...] = ()  # that it needs open


class Session(Protocol):
    """The nodes of one job, or of its cluster, and the job's workers on them.

    All methods may raise EngineError, and EngineLost if the engine does not respond at all.
    """

    def up(self, plan: Plan, stopped: Callable[[], bool] = never) -> None:
        """Bring up the nodes of `plan`; healthy ones are kept, others are replaced.

        Also raises EngineError soon after `stopped()` is true: pulling an image, for example, may take long.
        """

    def alive(self) -> dict[str, str]:
        """Nodes on which workers can start, with their host names; empty for this machine."""

    def wait_until_warm(self, nodes: Iterable[str], patience: float) -> bool:
        """Wait until nodes have imported the modules for workers; return False after `patience` seconds."""

    def adopt(self, plan: Plan) -> set[int]:
        """Take over the running workers of `plan`; return the ranks that their nodes do not know."""

    def gather(self, stopped: Callable[[], bool]) -> None:
        """Copy all files of workers on other machines to the job folder, unless `stopped()`.

        Raises OSError if the disk is full.
        """

    def start(self, plan: Plan, stopped: Callable[[], bool] = never) -> None:
        """Start the workers of `plan`, rank 0 first; one that cannot start counts as ended. Forget earlier workers.

        Those on other machines, to which files are sent first, do not start once `stopped()`.
        """

    def wait(self, timeout: float) -> Observed:
        """Wait up to `timeout` seconds for news of workers and nodes."""

    def activity(self) -> dict[int, Activity]:
        """Report what the running workers are doing, by rank, as far as their nodes know."""

    def stacks(self) -> dict[int, Stack]:
        """Return the stacks of the running workers, which go on, by rank."""

    def explain(self, end: WorkerExit, node: str) -> Reason | None:
        """Return the cause of a worker's end; None if only its exit code is known."""

    def stop(self, how: Stop) -> None:
        """Stop all workers."""

    def discard(self, nodes: Iterable[str]) -> None:
        """Remove nodes by force, for example because their workers do not end."""

    def down(self, grace: float, stopped: Callable[[], bool] = never) -> None:
        """Remove everything that `up` created, even if it failed midway; nodes get `grace` seconds to end.

        Files on other machines are first copied to the job folder, unless `stopped()`. If that is incomplete, the nodes
        are kept and EngineError is raised.
        """


class Engine(Protocol):
    """A place where jobs can run.

    All methods may raise EngineError, and EngineLost if the engine does not respond at all.
    """

    name: str  # as in a job file

    def prepare(self, spec: JobSpec, run: Path) -> None:
        """Build or pull the image of a job, and install its packages; raises ResourceError if that fails.

        `run` is the folder to mount in nodes.
        """

    def inventory(self, spec: JobSpec, run: Path, run_image: bool) -> tuple[Inventory, Placement]:
        """Return the resources that the engine has for a job, and the placement of the job's own nodes.

        `run` is the folder to mount in nodes; `run_image` allows running the job's image.

        Raises ResourceError or UsageError if the job cannot run here.
        """

    def hidden(self, plan: Plan, run: Path) -> Collection[str]:
        """Return the paths in a job's code folder that nodes must not see; `run` is the folder that they see.

        Raises UsageError if something cannot be hidden.
        """

    def open(self, spec: JobSpec, plan: Plan, run: Path, warn: Callable[[str], None]) -> Session:
        """Open the session of a job, whose nodes may exist already; `warn` receives messages for the user."""

    def inside(self, spec: JobSpec, plan: Plan, run: Path, worker: WorkerPlan, terminal: bool) -> Local:
        """Return what starts a command beside a worker, with its environment and working directory.

        The words of that command follow; `terminal` gives it a terminal. `run` is the folder that nodes see. Raises
        UsageError if that is not possible here, or the node of the worker does not run.
        """

    def jobs(self) -> list[JobState]:
        """List the jobs that have nodes here."""

    def resources(self, job_id: str) -> list[str]:
        """Describe everything that `remove` would remove."""

    def remove(self, job_id: str, grace: float) -> None:
        """Remove everything of a job that has no supervisor; its nodes get `grace` seconds to end."""
