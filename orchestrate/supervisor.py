"""The supervisor carries a job through its generations to an outcome. It decides; it prints nothing, and no engine."""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from orchestrate.engines import Engine
from orchestrate.errors import EngineError, EngineLost, OrchestrateError
from orchestrate.events import History, Recorder
from orchestrate.generation import BY_USER, Generation
from orchestrate.patterns import Patterns
from orchestrate.plan import Plan, in_order, names, plan
from orchestrate.restarts import Ended, decide
from orchestrate.spec import JobSpec
from orchestrate.traces import Traces

PATIENCE = 300.0  # seconds that the engine may be away, or the disk of the run directory full
MENDS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)  # what may be over soon; a folder that is gone is gone
HURRY = 10.0  # seconds, where the job is to stop
TRIES = 3  # to bring nodes back, a second apart
REJOIN = (10.0, 300.0)  # seconds between two tries to bring a missing node back, at first and at most


@dataclass(frozen=True)
class Outcome:
    """How a job ended: `word` is succeeded, failed, stopped or lost."""

    word: str
    why: str  # for a person
    left: str = ""  # why nodes were left, where they could not be taken down, or still have files


class _Full(OSError):
    """What can be written again once there is space, or the disk answers."""


class Supervisor:
    """One job, from where its events stand to its end."""

    def __init__(
        self,
        spec: JobSpec,
        plan: Plan,
        run: Path,
        engine: Engine,
        emit: Recorder,
        stops: Callable[[], int],
        traces: Traces,
        keep: Callable[[Plan], None],
    ) -> None:
        """`plan` is that of the newest generation, and `keep` writes down the plan of each new one.

        `run` is the folder that nodes see: the job's, or that of its cluster, in which the job's is.
        `stops()` is how often somebody has asked the job to stop.
        """
        self.spec, self.run, self.engine = spec, run, engine
        self.plan = replace(plan, command=spec.command)  # that of plan.json shows no secrets
        self.emit, self.stops, self.traces, self.keep = emit, stops, traces, keep
        self.history = History(emit.events)
        logs = [rule["log"] for rule in spec.rules if "log" in rule]
        self.patterns = Patterns(logs, lambda text: emit("warning", text=text))
        self.met = False  # whether the engine knows the job, by `up` or `adopt`
        self.pool = ThreadPoolExecutor(1)
        self.rejoining: Future[None] | None = None
        self.rejoin_at, self.rejoin_delay = 0.0, REJOIN[0]

    def supervise(self) -> Outcome:
        """Run the job and take its nodes down, whatever happens; raises OrchestrateError where it could not start."""
        failure = None
        decided = self.history.outcome
        outcome = Outcome(*decided) if decided else None
        if self.history.running < 0 and (decided or self.history.ended):
            self._meet()
        try:
            if outcome is None:
                outcome = self._carry()
                self.emit("outcome", outcome=outcome.word, reason=outcome.why)
        except OrchestrateError as error:
            failure = error
            self.emit("outcome", outcome="failed", reason=self.could_not(error))
        except BaseException:
            self._end_rejoining()
            with contextlib.suppress(EngineError):  # nodes with files that are not here stay
                self.engine.down(0)
            raise
        self._end_rejoining()
        self.emit("nodes_stopping")
        left = ""
        try:
            grace = 0 if self._hurried() else self.spec.grace
            if self.met:
                self.engine.down(grace, self._hurried)
            elif self.plan.inventory.cluster:
                self.engine.adopt(self.spec, self.plan, self.run)
                self.engine.down(grace, self._hurried)
            else:  # what another supervisor has left; this one has not asked for any node
                self.engine.remove(self.plan.job_id, grace)
            self.emit("nodes_down")
        except OrchestrateError as error:
            left = str(error)
            self.emit("nodes_left", error=left)
        for text in self.engine.warnings():
            self.emit("warning", text=text)
        if failure:
            raise failure
        assert outcome
        return replace(outcome, left=left)

    def could_not(self, error: OrchestrateError) -> str:
        """What an error has kept the job from."""
        return f"could not {'go on' if self.history.ended else 'start'}: {error}"

    def _hurried(self) -> bool:
        """Whether the job was asked to stop a second time."""
        return self.stops() > 1

    def _meet(self) -> None:
        """Know the nodes that an earlier supervisor has left: what they have written may not be here yet."""
        with contextlib.suppress(EngineError):
            self.engine.adopt(self.spec, self.plan, self.run)
            self.met = True

    def _carry(self) -> Outcome:
        """Launch generation after generation until one ends the job."""
        try:
            ended = self._take_over()
        except EngineLost as error:
            return Outcome("stopped", BY_USER) if self.stops() else Outcome("lost", str(error))
        while True:
            if ended is None:
                if self.stops():
                    return Outcome("stopped", BY_USER)
                try:
                    self._bring_up()
                except EngineError as error:
                    if self.stops():
                        return Outcome("stopped", BY_USER)
                    if not self.history.ended:
                        raise
                    if isinstance(error, EngineLost):
                        return Outcome("lost", str(error))
                    return Outcome("failed", f"the job cannot go on: {error}")
                if self.stops():
                    return Outcome("stopped", BY_USER)
                ended = self._note(self._next_generation().watch())
            if ended.cause:
                self.patterns.renew()
                decision = decide(self.spec, self.history.ended, self._search)
                self.emit("decision", restart=decision.restart, why=decision.why, delay=decision.delay)
                if not decision.restart:
                    return Outcome("failed", decision.why)
                if self._sleep(decision.delay):
                    return Outcome("stopped", BY_USER)
            elif ended.word != "rescaled":
                return Outcome(ended.word, ended.why)
            ended = None

    def _search(self, pattern: str, text: str) -> bool:
        """Whether a rule's pattern is in what a worker wrote; none is where the job is to stop, which must not wait."""
        return not self.stops() and self.patterns.search(pattern, text)

    def _take_over(self) -> Ended | None:
        """Go on with what an earlier supervisor left: a generation whose workers run, or one that has just ended."""
        if self.history.running < 0:
            return self.history.ended[-1] if self.history.ended else None
        self.met = True
        self.emit("taken_over", generation=self.history.running)
        self.traces.generation = self.plan.generation
        generation = Generation(self, self.plan)
        generation.restore(self.history.exits, self.history.stopping, self.history.states)
        self._patiently(generation.adopt, EngineLost, "engine_lost")
        return self._note(generation.watch())

    def _bring_up(self) -> None:
        """Have all nodes up, or as many as the job may go on with, and make the plan of the next generation."""
        number = self.history.ended[-1].generation + 1 if self.history.ended else 0
        wanted = names(self.spec)
        self.met = True
        self.emit("nodes_starting", nodes=len(wanted), engine=self.plan.engine)
        self._end_rejoining()
        error = ""
        everything = replace(self._planned(wanted, number), nodes=names(self.spec, spares=True))
        try:
            if number and self.spec.spares and len(self.engine.alive()) >= len(wanted):
                # A spare node takes the place of one that is lost; that one comes back meanwhile.
                self.rejoining = self.pool.submit(self._up, everything)
            else:
                self._try_up(everything, TRIES if number else 1)
        except EngineLost:
            raise
        except EngineError as lacking:
            if not number or (self.spec.min_trainers is None and len(self.engine.alive()) < len(wanted)):
                raise
            error = str(lacking)
            self.rejoin_at = time.monotonic() + self.rejoin_delay
        nodes = in_order(self.engine.alive())[: len(wanted)]
        missing = len(wanted) - len(nodes)
        error = error or f"{len(nodes)} of {len(wanted)} nodes are alive"
        fewest = self.spec.trainers if self.spec.min_trainers is None or not number else self.spec.min_trainers
        if len(nodes) < 1 + fewest:
            raise EngineError(error)
        if missing:
            self.emit("nodes_missing", nodes=list(nodes), missing=missing, error=error)
        hosts = {node: host for node in nodes if (host := self.engine.host(node))}
        self.emit("nodes_up", nodes=list(nodes), **({"hosts": hosts} if hosts else {}))
        self._write(lambda: self.engine.gather(lambda: self.stops() > 0))
        self.plan = self._planned(nodes, number)
        self._write(lambda: self.keep(self.plan))

    def _try_up(self, wanted: Plan, tries: int) -> None:
        """Have the nodes up; whoever took one down may still be at it, so a later generation tries more than once."""
        while True:
            try:
                self._patiently(lambda: self._up(wanted), EngineLost, "engine_lost")
                alive = len(self.engine.alive())
                if alive >= len(wanted.nodes):
                    return
                raise EngineError(f"{alive} of {len(wanted.nodes)} nodes are alive")
            except EngineLost:
                raise
            except EngineError:
                tries -= 1
                if not tries or self.stops() or self._sleep(1.0):
                    raise

    def _up(self, wanted: Plan) -> None:
        self.engine.up(self.spec, wanted, self.run, lambda: self.stops() > 0)

    def _planned(self, nodes: tuple[str, ...], generation: int) -> Plan:
        """The plan of a generation; the first one has been made already, and shown."""
        if generation == self.plan.generation and nodes == self.plan.nodes:
            return self.plan
        port = self.engine.port(self.spec, generation)
        return plan(self.spec, self.plan.inventory, self.plan.job_id, port, generation, nodes)

    def _next_generation(self) -> Generation:
        """Fence off all older workers, and make ready to launch the plan."""
        number = self.plan.generation
        self.traces.generation = number
        self._write(lambda: self.traces.fence(number))
        port = self.plan.workers[0].env["MASTER_PORT"]
        facts = {"nodes": list(self.plan.nodes), "world_size": self.plan.world_size, "master_port": int(port)}
        self.emit("generation_starting", generation=number, **facts)
        return Generation(self, self.plan)

    def _end_rejoining(self) -> None:
        """Wait for the try to bring a node back that is under way: what it brings up must be known."""
        if self.rejoining:
            self.rejoining.exception()
            self.rejoining = None

    def _note(self, ended: Ended) -> Ended:
        self.history.ended.append(ended)
        self.emit("generation_ended", **asdict(ended))
        return ended

    def can_rescale(self) -> bool:
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
        self.rejoin_delay = min(REJOIN[1], self.rejoin_delay * 2)
        self.rejoin_at = time.monotonic() + self.rejoin_delay
        return False

    def _patiently(self, action: Callable[[], None], fails: type[Exception], event: str) -> None:
        """Retry `action` until it succeeds or the time limit is over; emit `event` at the first failure.

        The limit is shorter if the job is being stopped: a paused node, for example, does not answer.
        """
        deadline = time.monotonic() + (HURRY if self.stops() else PATIENCE)
        told = False
        while True:
            try:
                return action()
            except fails as error:
                if not told:
                    self.emit(event, error=str(error))
                told = True
                if time.monotonic() > deadline or self._sleep(1.0):
                    raise

    def _write(self, action: Callable[[], None]) -> None:
        """Write what a generation cannot start without; a disk that is full may have space again soon."""

        def write() -> None:
            try:
                action()
            except OSError as error:
                if error.errno in MENDS:
                    raise _Full(error.errno, error.strerror, error.filename) from None
                raise

        try:
            self._patiently(write, _Full, "disk_full")
        except OSError as error:
            raise EngineError(f"the run directory cannot be written: {error}") from None

    def reconnect(self, generation: Generation) -> bool:
        """Wait for an engine that went away during a generation, and find its workers again; False if it stays away."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            if self._sleep(0.5):
                return False
            try:
                generation.adopt()
            except EngineError:
                continue
            self.emit("engine_back")
            return True
        return False

    def _sleep(self, seconds: float) -> bool:
        """Wait; True as soon as somebody asks the job to stop."""
        deadline = time.monotonic() + seconds
        before = self.stops()
        while time.monotonic() < deadline and self.stops() == before:
            time.sleep(0.05)
        return self.stops() > before
