"""The nodes of a job: started, replaced by standby nodes, and brought back while the job runs on fewer."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from orchestrate.engines.ports import port
from orchestrate.errors import AllocationLost, EngineError, EngineLost
from orchestrate.plan.plan import Plan, in_order, names, plan
from orchestrate.record import events
from orchestrate.supervise.context import JobContext
from orchestrate.supervise.work_copy import WorkCopy

MAX_ATTEMPTS = 3  # to start nodes of a later generation, a second apart
REJOIN_INTERVAL = (10.0, 300.0)  # seconds between attempts to bring back a missing node: initial and maximum


class Nodes:
    """The nodes of one job on its engine."""

    def __init__(self, job: JobContext, hosts: dict[str, str], keep: Callable[[Plan], None]) -> None:
        """`hosts` are the last known hosts by node, if the engine has several; `keep` saves each new plan."""
        self.job, self.plan, self.hosts, self.keep = job, job.plan, hosts, keep
        self.spec, self.emit = job.spec, job.emit
        self.pool = ThreadPoolExecutor(1)
        self.work_copy = WorkCopy(job)
        self.rejoining: Future[None] | None = None
        self.rejoin_at, self.rejoin_delay = 0.0, REJOIN_INTERVAL[0]

    def bring_up(self, number: int, first: bool) -> None:
        """Start all nodes, or at least as many as the job can continue with, and plan generation `number`.

        `first` is whether it is the first one since the job was started or resumed, which needs all nodes.
        """
        wanted = names(self.spec)
        self.emit(events.NodesStarting(len(wanted), self.plan.engine))
        copies = first and self.plan.placement.copies
        if copies:
            self.work_copy.begin()
        self.end_rejoining()
        alive, error = self._start(replace(self._planned(wanted, number), nodes=names(self.spec, spares=True)), first)
        nodes = in_order(alive)[: len(wanted)]
        missing = len(wanted) - len(nodes)
        error = error or f"{len(nodes)} of {len(wanted)} nodes are running"
        minimum = self.spec.trainers if self.spec.min_trainers is None or first else self.spec.min_trainers
        if len(nodes) < 1 + minimum:
            raise EngineError(error)
        if missing:
            self.emit(events.NodesMissing(nodes, missing, error))
        else:
            self.rejoin_delay = REJOIN_INTERVAL[0]
        self.hosts = {node: alive[node] for node in nodes if alive[node]}
        self.emit(events.NodesUp(nodes, self.hosts))
        if copies:
            self.work_copy.finish()
        self.job.write(lambda: self.job.session.gather(self.job.is_over))
        self.plan = self._planned(nodes, number)
        self.job.write(lambda: self.keep(self.plan))

    def _start(self, wanted: Plan, first: bool) -> tuple[dict[str, str], str]:
        """Start missing nodes; return the running ones with their hosts, and the error if some could not start.

        Raises EngineError if the job cannot continue with fewer.
        """
        count = len(names(self.spec))
        left = self.job.session.alive() if not first and self.spec.spares else {}
        if len(left) >= count:
            # Standby nodes replace the lost ones, which are brought back in the background.
            self.rejoining = self.pool.submit(self._up, wanted)
            alive = self.job.session.alive()
            return {node: host for node, host in alive.items() if node in left}, ""  # without one that is already back
        try:
            return self._try_up(wanted, 1 if first else MAX_ATTEMPTS), ""
        except EngineLost:
            raise
        except EngineError as failure:
            if first or (self.spec.min_trainers is None and len(self.job.session.alive()) < count):
                raise
            self.rejoin_at = self.job.clock.monotonic() + self.rejoin_delay
            return self.job.session.alive(), str(failure)

    def are_back(self) -> bool:
        """Whether a missing node is back; at intervals, starts an attempt to bring it back in the background."""
        if len(self.plan.nodes) == len(names(self.spec)):
            return False
        if self.rejoining is None and self.job.clock.monotonic() > self.rejoin_at:
            wanted = self._planned(names(self.spec), self.plan.generation)
            self.rejoining = self.pool.submit(self._up, wanted)
        if self.rejoining is None or not self.rejoining.done():
            return False
        if self.rejoining.exception() is None:
            return True
        self.rejoining = None
        self.rejoin_delay = min(REJOIN_INTERVAL[1], self.rejoin_delay * 2)
        self.rejoin_at = self.job.clock.monotonic() + self.rejoin_delay
        return False

    def end_background(self) -> None:
        """Wait for what runs in the background, so that nothing is started or written unnoticed."""
        self.end_rejoining()
        self.work_copy.end()

    def end_rejoining(self) -> None:
        """Wait for a running attempt to bring back a node, so that no node is started unnoticed."""
        if self.rejoining:
            self.rejoining.exception()
            self.rejoining = None

    def _try_up(self, wanted: Plan, tries: int) -> dict[str, str]:
        """Start the nodes, in up to `tries` attempts, since an old node may still be shutting down; return all."""
        while True:
            try:
                self.job.retry(lambda: self._up(wanted), EngineLost, events.EngineLost)
                alive = self.job.session.alive()
                if len(alive) >= len(wanted.nodes):
                    return alive
                raise EngineError(f"{len(alive)} of {len(wanted.nodes)} nodes are running")
            except (EngineLost, AllocationLost):
                raise
            except EngineError:
                tries -= 1
                if not tries or self.job.over() or self.job.sleep(1.0):
                    raise

    def _up(self, wanted: Plan) -> None:
        self.job.session.up(wanted, self.job.is_over)

    def _planned(self, nodes: tuple[str, ...], generation: int) -> Plan:
        """Return the plan of a generation; that of the first one already exists and was printed."""
        if generation == self.plan.generation and nodes == self.plan.nodes:
            return self.plan
        last = self.plan
        master_port = port(last.placement.network, generation)
        return plan(self.spec, last.inventory, last.placement, last.job_id, master_port, generation, nodes)
