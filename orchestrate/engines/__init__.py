"""Engine: where nodes live. An engine does as it is told; it never prints and never decides."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from orchestrate.paths import NAME, NODES, JobPaths
from orchestrate.plan import Inventory, Plan, WorkerPlan
from orchestrate.spec import JobSpec

SWARMS = ("encrypt", "constraints", "volume")  # keys of a job file that only Swarm has something for
LOST = 137  # the exit code of a worker that was lost with its node: as SIGKILL's
TERMINATED = 143  # of one that SIGTERM ended, or that was asked to end before it started


@dataclass(frozen=True)
class Exit:
    """The end of a worker."""

    rank: int
    code: int  # 128 + n where signal n ended it
    asked: bool = True  # whether its node had asked it to end; true where that is unknown


@dataclass(frozen=True)
class Doing:
    """What a worker is doing."""

    state: str  # a letter of proc(5): R runs, S sleeps, D waits for a disk, T is stopped; empty where nobody knows
    cpu: float  # seconds that it and all that it started have used


@dataclass(frozen=True)
class JobState:
    """A job or a cluster whose nodes exist, as `ps` shows it."""

    job_id: str
    engine: str
    nodes: int
    run: Path  # the folder that they see
    owner: int  # the user id of whoever started it

    @property
    def paths(self) -> JobPaths:
        """Its files; a folder with one of them is what its nodes see."""
        return JobPaths(self.run.parent)

    @property
    def named(self) -> bool:
        """Whether its folder has its name, as all that we make have."""
        return NAME.fullmatch(self.job_id) is not None and self.run.parent.name == self.job_id

    @property
    def cluster(self) -> bool:
        """Whether the nodes are those of a cluster."""
        return self.run.name == NODES


def ignoring(spec: JobSpec, keys: Iterable[str]) -> str:
    """That an engine has nothing for these keys, where a job file sets one."""
    found = [key for key in keys if getattr(spec, key) != getattr(JobSpec(), key)]
    return f", ignoring {', '.join(found)}" if found else ""


def never() -> bool:
    """Nobody asks to stop."""
    return False


class Engine(Protocol):
    """What the supervisor and the commands ask of a place where nodes live.

    All may raise EngineError, and EngineLost where the engine does not answer at all.
    """

    name: str  # as in a job file

    def inventory(self, spec: JobSpec, run: Path, prepare: bool) -> Inventory:
        """Check that the engine can run `spec` and say what it has; `prepare`: build or pull a missing image."""

    def port(self, spec: JobSpec, generation: int) -> int:
        """Where rank 0 of a generation may listen: another port than that of the generation before."""

    def up(self, spec: JobSpec, plan: Plan, run: Path, stopped: Callable[[], bool] = never) -> None:
        """Have as many nodes up as `plan` has; what is there and well stays, what is not is replaced.

        Raises EngineError soon after `stopped()`, too: nodes may take long, for an image that is pulled, say.
        """

    def alive(self) -> set[str]:
        """The nodes on which workers can start."""

    def host(self, node: str) -> str:
        """The name of the machine that a node was on when the engine looked last, where there are several; else ''."""

    def adopt(self, spec: JobSpec, plan: Plan, run: Path) -> set[int]:
        """Take up the workers of `plan` that were started earlier; return the ranks that living nodes do not know."""

    def gather(self, stopped: Callable[[], bool]) -> None:
        """Have in the job's folder all that workers have written, where they write elsewhere, until `stopped()`.

        Raises OSError where the disk is full.
        """

    def start(self, workers: tuple[WorkerPlan, ...], command: tuple[str, ...]) -> None:
        """Start the workers, rank 0 first; one that cannot start has ended. Earlier workers are forgotten."""

    def wait(self, timeout: float) -> list[Exit]:
        """The workers that have ended since the last call, in order; at most `timeout` seconds pass."""

    def explain(self, end: Exit, node: str) -> str:
        """What is known of the end of a worker on `node` besides its code: a cause of `restarts.CAUSES`, or nothing."""

    def troubles(self) -> dict[str, str]:
        """The nodes that are `paused` or `silent`, or cut off from the network (`partition`)."""

    def warnings(self) -> list[str]:
        """What a user must know about the nodes, once each."""

    def doing(self) -> dict[int, Doing]:
        """What the running workers are doing, as far as their nodes say."""

    def dump(self) -> None:
        """Have all workers print where they stand, and abort."""

    def stop(self, kill: bool) -> None:
        """Ask all workers to stop; the nodes kill them after the grace period, or at once."""

    def discard(self, nodes: Iterable[str]) -> None:
        """Remove nodes, by force, whose workers do not end."""

    def down(self, grace: float) -> None:
        """Remove all that `up` made, also half of it; nodes get `grace` seconds to end."""

    def jobs(self) -> list[JobState]:
        """The jobs that have nodes here."""

    def holds(self, job_id: str) -> list[str]:
        """All that a job has here, in words: what `remove` would remove."""

    def remove(self, job_id: str, grace: float) -> None:
        """Stop and remove what a job has here, after its orchestrator has gone."""
