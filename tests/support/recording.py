"""An engine without nodes, for tests: it plays scripted exits and records calls."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from orchestrate.engines.base import Engine, JobState, Local, Observed, Session, Stop, never
from orchestrate.errors import EngineError
from orchestrate.plan.plan import Inventory, Placement, Plan, WorkerPlan, names
from orchestrate.record.outcomes import Activity, Stack, WorkerExit
from orchestrate.spec.causes import Reason
from orchestrate.spec.spec import JobSpec


class RecordingEngine:
    """An engine with one job, and the session of that job.

    Its results are attributes that tests may change at any time; its methods may be replaced.
    """

    name = "recording"

    def __init__(self, *generations: list[list[WorkerExit]], stubborn: bool = False) -> None:
        """Each generation is a list of exits per call of `wait`; a stop ends all other workers unless `stubborn`."""
        self.generations, self.stubborn = [list(batches) for batches in generations], stubborn
        self.calls: list[str] = []  # names of the calls that change something
        self.plans: list[Plan] = []  # plans that were started
        self.graces: list[float] = []  # grace period of each `down` and `remove`
        self.states: list[JobState] = []  # results of `jobs`
        self.things: list[str] = []  # objects of the job; `up` creates its nodes, `down` and `remove` remove everything
        self.nodes = {*names(JobSpec(trainers=2))}
        self.masked: set[str] = set()  # paths in the code folder that nodes must not see
        self.missing: set[str] = set()  # nodes that fail to start
        self.hosts: dict[str, str] = {}  # by node
        self.slow: list[set[int]] = []  # workers that have not started, by call of `wait`
        self.warm = True  # whether nodes finish their imports in time
        self.full: list[OSError] = []  # why files cannot be copied, by call of `gather`
        self.run = Path()  # the folder that would be mounted in nodes
        self.warn: Callable[[str], None] = lambda text: None
        self.running: set[int] = set()
        self.batches: list[list[WorkerExit]] = []

    # --- the engine

    def prepare(self, spec: JobSpec, run: Path) -> None:
        """Record the call."""
        self.calls.append("prepare")

    def inside(self, spec: JobSpec, plan: Plan, run: Path, worker: WorkerPlan, terminal: bool) -> Local:
        """Return nothing but the worker's environment."""
        return Local([], worker.env)

    def inventory(self, spec: JobSpec, run: Path, run_image: bool) -> tuple[Inventory, Placement]:
        """Return two cores and no GPU."""
        inventory = Inventory(
            engine=self.name,
            about="no nodes",
            cores=(0, 1),
            gpus=(),
            no_gpus="it has none",
        )
        return inventory, Placement(network="bridge", master_addr="", interface="eth0", job_dir=str(run))

    def hidden(self, plan: Plan, run: Path) -> Collection[str]:
        """Return `masked`."""
        return self.masked

    def open(self, spec: JobSpec, plan: Plan, run: Path, warn: Callable[[str], None]) -> RecordingEngine:
        """Return itself."""
        self.run, self.warn = run, warn
        return self

    def jobs(self) -> list[JobState]:
        """Return `states`."""
        return self.states

    def resources(self, job_id: str) -> list[str]:
        """Return `things`."""
        return [*self.things]

    def remove(self, job_id: str, grace: float) -> None:
        """Record the call."""
        self.calls.append(f"remove {job_id}")
        self.graces.append(grace)
        self.things.clear()

    # --- the session

    def up(self, plan: Plan, stopped: Callable[[], bool] = never) -> None:
        """Record the call; raises EngineError if a node of the plan is missing."""
        self.calls.append("up")
        if self.missing & set(plan.nodes):
            raise EngineError("no such node")
        self.things = [f"container {node}" for node in plan.nodes]

    def alive(self) -> dict[str, str]:
        """Return the nodes that are not missing."""
        return {node: self.hosts.get(node, "") for node in self.nodes - self.missing}

    def wait_until_warm(self, nodes: Iterable[str], patience: float) -> bool:
        """Record the call."""
        self.calls.append("warmed")
        return self.warm

    def adopt(self, plan: Plan) -> set[int]:
        """Play the next generation as if it were already running."""
        self.calls.append("adopt")
        self.running = {worker.rank for worker in plan.workers}
        self.batches = self.generations.pop(0) if self.generations else []
        return set()

    def gather(self, stopped: Callable[[], bool]) -> None:
        """Raise the next error of `full`."""
        if self.full:
            self.calls.append("gather")
            raise self.full.pop()

    def start(self, plan: Plan, stopped: Callable[[], bool] = never) -> None:
        """Play the next generation."""
        self.calls.append("start")
        self.plans.append(plan)
        self.running = {worker.rank for worker in plan.workers}
        self.batches = self.generations.pop(0)

    def wait(self, timeout: float) -> Observed:
        """Return the next exits of the generation."""
        exits = self.batches.pop(0) if self.batches else []
        self.running -= {end.rank for end in exits}
        return Observed(exits, self.slow.pop(0) if self.slow else set(), self.troubles())

    def troubles(self) -> dict[str, str]:
        """Return the troubles that `wait` reports: none."""
        return {}

    def activity(self) -> dict[int, Activity]:
        """Report all running workers as sleeping."""
        return {rank: Activity("S", 1.0) for rank in self.running}

    def stacks(self) -> dict[int, Stack]:
        """Report where all running workers are."""
        return {rank: Stack(f'  File "train.py", line {rank} in step\n', state="S") for rank in self.running}

    def explain(self, end: WorkerExit, node: str) -> Reason | None:
        """Return None: only the exit code is known."""
        return None

    def stop(self, how: Stop) -> None:
        """Record the call; except for a dump, workers end at the next `wait` without other exits."""
        if how is Stop.DUMP:
            return self.dump()
        self.calls.append("kill" if how is Stop.KILL else "stop")
        if how is Stop.KILL or not self.stubborn:
            code = 137 if how is Stop.KILL else 143
            self.batches.append([WorkerExit(rank, code) for rank in sorted(self.running)])

    def dump(self) -> None:
        """Record the request for a stack dump."""
        self.calls.append("dump")

    def discard(self, nodes: Iterable[str]) -> None:
        """Record the call."""
        self.calls.append(f"discard {' '.join(sorted(nodes))}")

    def down(self, grace: float, stopped: Callable[[], bool] = never) -> None:
        """Record the call."""
        self.calls.append("down")
        self.graces.append(grace)
        self.things.clear()


_: tuple[Engine, Session] = (RecordingEngine(), RecordingEngine())  # checked by mypy: it implements both
