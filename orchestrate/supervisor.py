"""The supervisor drives a job to its outcome: gang start, gang stop, root cause. It decides, and never prints."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from orchestrate.engines import Engine, Exit
from orchestrate.errors import OrchestrateError
from orchestrate.events import Emit
from orchestrate.plan import Plan
from orchestrate.spec import JobSpec

BY_SIGNAL = {132, 134, 135, 136, 137, 139}  # ILL, ABRT, BUS, FPE, KILL, SEGV: a cause, never a complaint about a peer
STOPPED = 143  # TERM, which we send
COMPLAINTS = 2.0  # seconds in which the peers of a dead worker fail, too


@dataclass(frozen=True)
class Outcome:
    """How a job ended: `word` is succeeded, failed, stopped or lost."""

    word: str
    why: str  # finished, worker failed, stopped by the user, max_run, nodes did not answer
    root: Exit | None = None  # the first worker that failed
    cause: str = ""  # what the engine knows of its end besides


def supervise(
    spec: JobSpec,
    plan: Plan,
    run: Path,
    engine: Engine,
    emit: Emit,
    stops: Callable[[], int],
    complains: Callable[[int], bool],
) -> Outcome:
    """Run `plan` on `engine` and take the nodes down, whatever happens.

    `stops()` is how often somebody has asked the job to stop; `complains(rank)` tells whether a worker's last words
    are about a peer that has gone. Raises OrchestrateError where the job could not start.
    """
    outcome: Outcome | None = None
    try:
        emit("nodes_starting", nodes=list(plan.nodes), engine=plan.engine)
        engine.up(spec, plan, run)
        emit("nodes_up")
        if not stops():
            engine.start(plan.workers, plan.command)
            emit("generation_started", generation=0, world_size=plan.world_size)
            outcome = _Generation(spec, plan, engine, emit, stops, complains).watch()
        else:
            outcome = Outcome("stopped", "stopped by the user")
        return outcome
    finally:
        emit("nodes_stopping")
        try:
            engine.down(0 if stops() > 1 else spec.grace)
            emit("nodes_down")
        except OrchestrateError as error:
            emit("nodes_left", error=str(error))
            if outcome is None:
                raise


class _Generation:
    """One launch of all workers."""

    def __init__(
        self,
        spec: JobSpec,
        plan: Plan,
        engine: Engine,
        emit: Emit,
        stops: Callable[[], int],
        complains: Callable[[int], bool],
    ) -> None:
        self.spec, self.plan, self.engine, self.emit = spec, plan, engine, emit
        self.stops, self.complains = stops, complains
        self.running = {worker.rank for worker in plan.workers}
        self.failures: list[tuple[float, Exit]] = []
        self.heard = 0  # how many of the user's requests to stop have been passed on
        self.why = ""  # why the workers have been asked to stop
        self.started = time.monotonic()
        self.give_up = float("inf")

    def watch(self) -> Outcome:
        """Follow the workers until all have ended, or nobody answers any more."""
        while self.running and time.monotonic() < self.give_up:
            for end in self.engine.wait(timeout=0.1):
                self._ended(end)
            if self.stops() > self.heard:
                self.heard = self.stops()
                self._stop("stopped by the user")
            if self.spec.max_run and time.monotonic() - self.started > self.spec.max_run and not self.why:
                self._stop("max_run")
        if self.running:
            self.emit("workers_lost", ranks=sorted(self.running))
        if self.why in ("stopped by the user", "max_run"):
            return Outcome("stopped", self.why)
        if self.failures:
            root = self._root()
            return Outcome("failed", "worker failed", root, self.engine.explain(root))
        return Outcome("lost", "nodes did not answer") if self.running else Outcome("succeeded", "finished")

    def _ended(self, end: Exit) -> None:
        self.running.discard(end.rank)
        node = self.plan.workers[end.rank].node
        self.emit("worker_ended", rank=end.rank, node=node, exit_code=end.code, stopping=bool(self.why))
        if end.code:
            self.failures.append((time.monotonic(), end))
            if not self.why:
                self._stop("worker failed")

    def _stop(self, why: str) -> None:
        self.why = self.why or why
        self.emit("workers_stopping", why=why)
        self.engine.stop()
        self.give_up = time.monotonic() + (5 if self.stops() > 1 else self.spec.grace + 5)

    def _root(self) -> Exit:
        """The first worker that failed; but peers of a worker that is still dying may be heard before it.

        A death by signal, or by the node's, explains a complaint about a peer that has gone, and so does an error of
        another kind; never the other way round.
        """
        first_at, first = self.failures[0]
        near = [end for at, end in self.failures if at - first_at < COMPLAINTS and end.code != STOPPED] or [first]
        dead = [end for end in near if end.code in BY_SIGNAL]
        return next(iter(dead or [end for end in near if not self.complains(end.rank)] or near))
