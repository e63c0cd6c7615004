"""The supervisor drives a job to its outcome: gang start, gang stop, root cause. It decides, and never prints."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from orchestrate.engines import Engine, Exit
from orchestrate.errors import EngineError, OrchestrateError
from orchestrate.events import Emit
from orchestrate.plan import Plan
from orchestrate.spec import JobSpec

BY_SIGNAL = {132, 134, 135, 136, 137, 139}  # ILL, ABRT, BUS, FPE, KILL, SEGV: a cause, never a complaint about a peer
ABORTED = 134  # ABRT; NCCL's watchdog takes this way out when a peer has gone
STOPPED = 143  # TERM, which we send
COMPLAINTS = 2.0  # seconds in which the peers of a dead worker fail, too


@dataclass(frozen=True)
class Outcome:
    """How a job ended: `word` is succeeded, failed, stopped or lost."""

    word: str
    why: str  # finished, worker failed, stopped by the user, max_run, or what the engine said when it was lost
    root: Exit | None = None  # the first worker that failed
    cause: str = ""  # what the engine knows of its end besides
    left: str = ""  # why nodes could not be taken down, where they could not


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
    failure, outcome = None, Outcome("stopped", "stopped by the user")
    try:
        emit("nodes_starting", nodes=list(plan.nodes), engine=plan.engine)
        engine.up(spec, plan, run)
        emit("nodes_up")
        if not stops():
            engine.start(plan.workers, plan.command)
            emit("generation_started", generation=0, world_size=plan.world_size)
            outcome = _Generation(spec, plan, engine, emit, stops, complains).watch()
    except OrchestrateError as error:
        failure = error
    except BaseException:
        engine.down(0)
        raise
    emit("nodes_stopping")
    try:
        engine.down(0 if stops() > 1 else spec.grace)
        emit("nodes_down")
    except OrchestrateError as error:
        emit("nodes_left", error=str(error))
        outcome = replace(outcome, left=str(error))
    if failure:
        raise failure
    return outcome


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
        self.killed = False  # whether they have been killed, too
        self.started = time.monotonic()
        self.give_up = float("inf")

    def watch(self) -> Outcome:
        """Follow the workers until all have ended, or nobody answers any more."""
        lost = ""
        try:
            while self.running and time.monotonic() < self.give_up:
                self._step()
        except EngineError as error:
            lost = str(error)
        if self.running:
            self.emit("workers_lost", ranks=sorted(self.running), error=lost)
        if self.why in ("stopped by the user", "max_run"):
            return Outcome("stopped", self.why)
        if self.failures:
            root = self._root()
            cause = self.engine.explain(root, self.plan.workers[root.rank].node)
            return Outcome("failed", "worker failed", root, cause)
        return Outcome("lost", lost) if lost else Outcome("succeeded", "finished")

    def _step(self) -> None:
        for end in self.engine.wait(timeout=0.1):
            self._ended(end)
        if self.stops() > self.heard:
            self.heard = self.stops()
            self._stop("stopped by the user")
        if self.spec.max_run and time.monotonic() - self.started > self.spec.max_run and not self.why:
            self._stop("max_run")

    def _ended(self, end: Exit) -> None:
        self.running.discard(end.rank)
        node = self.plan.workers[end.rank].node
        self.emit("worker_ended", rank=end.rank, node=node, exit_code=end.code, stopping=bool(self.why))
        if end.code and not self.killed:
            self.failures.append((time.monotonic(), end))
            if not self.why:
                self._stop("worker failed")

    def _stop(self, why: str) -> None:
        self.why = self.why or why
        self.killed = self.killed or self.stops() > 1
        self.emit("workers_stopping", why=why, kill=self.killed)
        self.engine.stop(kill=self.killed)
        self.give_up = time.monotonic() + (5 if self.killed else self.spec.grace + 5)

    def _root(self) -> Exit:
        """The first worker that failed; but peers of a worker that is still dying may be heard before it.

        A death by signal, or by the node's, explains a complaint about a peer that has gone, and so does an error of
        another kind; never the other way round.
        """
        first_at, first = self.failures[0]
        window = min(COMPLAINTS, self.spec.grace)  # later, it is we who kill
        near = [end for at, end in self.failures if at - first_at < window and end.code != STOPPED] or [first]
        own = [end for end in near if not self.complains(end.rank)]
        dead = [end for end in near if end.code in BY_SIGNAL and (end.code != ABORTED or end in own)]
        return next(iter(dead or own or near))
