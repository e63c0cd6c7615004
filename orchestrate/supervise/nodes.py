"""The nodes of a job: brought up, replaced by spare ones, and brought back while the job runs on fewer."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from orchestrate.engines.ports import port
from orchestrate.errors import EngineError, EngineLost
from orchestrate.job import events
from orchestrate.job.plan import Plan, in_order, names, plan
from orchestrate.supervise.running import Running

MAX_ATTEMPTS = 3  # to bring nodes back, a second apart
REJOIN_INTERVAL = (10.0, 300.0)  # seconds between two tries to bring a missing node back, at first and at most


class Nodes:
    """Those that the engine keeps for one job."""

    def __init__(self, job: Running, hosts: dict[str, str], keep: Callable[[Plan], None]) -> None:
        """`hosts` is where the nodes were last, as far as they have hosts; `keep` writes down each new plan."""
        self.job, self.plan, self.hosts, self.keep = job, job.plan, hosts, keep
        self.spec, self.emit = job.spec, job.emit
        self.pool = ThreadPoolExecutor(1)
        self.rejoining: Future[None] | None = None
        self.rejoin_at, self.rejoin_delay = 0.0, REJOIN_INTERVAL[0]

    def bring_up(self, number: int) -> None:
        """Have all nodes up, or as many as the job may go on with, and make the plan of generation `number`."""
        wanted = names(self.spec)
        self.emit(events.NodesStarting(len(wanted), self.plan.engine))
        self.end_rejoining()
        error = ""
        everything = replace(self._planned(wanted, number), nodes=names(self.spec, spares=True))
        left = self.job.session.alive() if number and self.spec.spares else {}
        try:
            if len(left) >= len(wanted):
                # A spare node takes the place of one that is lost; that one comes back meanwhile.
                self.rejoining = self.pool.submit(self._up, everything)
            else:
                self._try_up(everything, MAX_ATTEMPTS if number else 1)
        except EngineLost:
            raise
        except EngineError as lacking:
            if not number or (self.spec.min_trainers is None and len(self.job.session.alive()) < len(wanted)):
                raise
            error = str(lacking)
            self.rejoin_at = time.monotonic() + self.rejoin_delay
        alive = self.job.session.alive()
        if self.rejoining:  # one that is back this soon takes no place either
            alive = {node: host for node, host in alive.items() if node in left}
        nodes = in_order(alive)[: len(wanted)]
        missing = len(wanted) - len(nodes)
        error = error or f"{len(nodes)} of {len(wanted)} nodes are alive"
        fewest = self.spec.trainers if self.spec.min_trainers is None or not number else self.spec.min_trainers
        if len(nodes) < 1 + fewest:
            raise EngineError(error)
        if missing:
            self.emit(events.NodesMissing(nodes, missing, error))
        self.hosts = {node: alive[node] for node in nodes if alive[node]}
        self.emit(events.NodesUp(nodes, self.hosts))
        self.job.write(lambda: self.job.session.gather(lambda: self.job.stops() > 0))
        self.plan = self._planned(nodes, number)
        self.job.write(lambda: self.keep(self.plan))

    def are_back(self) -> bool:
        """Whether a node that was missing is back; tries to bring it back, in the background and not too often."""
        if len(self.plan.nodes) == len(names(self.spec)):
            return False
        if self.rejoining is None and time.monotonic() > self.rejoin_at:
            wanted = self._planned(names(self.spec), self.plan.generation)
            self.rejoining = self.pool.submit(self._up, wanted)
        if self.rejoining is None or not self.rejoining.done():
            return False
        if self.rejoining.exception() is None:
            return True
        self.rejoining = None
        self.rejoin_delay = min(REJOIN_INTERVAL[1], self.rejoin_delay * 2)
        self.rejoin_at = time.monotonic() + self.rejoin_delay
        return False

    def end_rejoining(self) -> None:
        """Wait for the try to bring a node back that is under way: what it brings up must be known."""
        if self.rejoining:
            self.rejoining.exception()
            self.rejoining = None

    def _try_up(self, wanted: Plan, tries: int) -> None:
        """Bring the nodes up; in a later generation more than once, since a node may still be on its way down."""
        while True:
            try:
                self.job.patiently(lambda: self._up(wanted), EngineLost, events.EngineLost)
                alive = len(self.job.session.alive())
                if alive >= len(wanted.nodes):
                    return
                raise EngineError(f"{alive} of {len(wanted.nodes)} nodes are alive")
            except EngineLost:
                raise
            except EngineError:
                tries -= 1
                if not tries or self.job.stops() or self.job.sleep(1.0):
                    raise

    def _up(self, wanted: Plan) -> None:
        self.job.session.up(wanted, lambda: self.job.stops() > 0)

    def _planned(self, nodes: tuple[str, ...], generation: int) -> Plan:
        """The plan of a generation; the first one has been made already, and shown."""
        if generation == self.plan.generation and nodes == self.plan.nodes:
            return self.plan
        made = self.plan
        listen = port(made.placement.network, generation)
        return plan(self.spec, made.inventory, made.placement, made.job_id, listen, generation, nodes)
