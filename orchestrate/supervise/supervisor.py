"""The supervisor carries a job through its generations to an outcome. It decides; it prints nothing, and no engine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from orchestrate.engines.base import Engine
from orchestrate.errors import EngineError, EngineLost, OrchestrateError
from orchestrate.job import events
from orchestrate.job.history import History
from orchestrate.job.outcomes import GenerationResult, JobResult, Outcome
from orchestrate.job.patterns import Patterns
from orchestrate.job.plan import Plan
from orchestrate.job.recorder import Recorder
from orchestrate.job.spec import JobSpec
from orchestrate.supervise.generation import BY_USER, Generation
from orchestrate.supervise.job_files import JobFiles
from orchestrate.supervise.nodes import Nodes
from orchestrate.supervise.policy import decide
from orchestrate.supervise.running import Running


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
        files: JobFiles,
        keep: Callable[[Plan], None],
    ) -> None:
        """`plan` is that of the newest generation, and `keep` writes down the plan of each new one.

        `run` is the folder that nodes see: the job's, or that of its cluster, in which the job's is.
        `stops()` is how often the job was asked to stop.
        """
        plan = replace(plan, command=spec.command)  # that of plan.json shows no secrets
        self.job = Running(spec=spec, plan=plan, run=run, engine=engine, emit=emit, stops=stops, files=files)
        self.spec, self.emit, self.stops, self.files = spec, emit, stops, files
        self.history = History(emit.events)
        self.nodes = Nodes(self.job, self.history.hosts, keep)
        logs = [rule["log"] for rule in spec.rules if "log" in rule]
        self.patterns = Patterns(logs, self.job.warn)
        self.met = False  # whether the engine knows the job, by `up` or `adopt`

    @property
    def plan(self) -> Plan:
        """The plan of the newest generation."""
        return self.nodes.plan

    def supervise(self) -> JobResult:
        """Run the job and take its nodes down, whatever happens; raises OrchestrateError where it could not start."""
        failure = None
        outcome = self.history.outcome
        if self.history.running < 0 and (outcome or self.history.ended):
            self._meet()
        try:
            if outcome is None:
                outcome = self._carry()
                self.emit(events.OutcomeDecided(outcome.word, outcome.why))
        except OrchestrateError as error:
            failure = error
            self.emit(events.OutcomeDecided(Outcome.FAILED, self.could_not(error)))
        except BaseException:
            self.nodes.end_rejoining()
            with contextlib.suppress(EngineError):  # nodes with files that are not here stay
                self.job.session.down(0)
            raise
        self.nodes.end_rejoining()
        self.emit(events.NodesStopping())
        left = ""
        try:
            grace = 0 if self.job.hurried() else self.spec.grace
            if self.met:
                self.job.session.down(grace, self.job.hurried)
            elif self.plan.placement.cluster:
                self.job.session.adopt(self.plan)
                self.job.session.down(grace, self.job.hurried)
            else:  # what another supervisor has left; this one has not asked for any node
                self.job.engine.remove(self.plan.job_id, grace)
            self.emit(events.NodesDown())
        except OrchestrateError as error:
            left = str(error)
            self.emit(events.NodesLeft(left))
        if failure:
            raise failure
        assert outcome
        return replace(outcome, left=left)

    def could_not(self, error: OrchestrateError) -> str:
        """What an error has kept the job from."""
        return f"could not {'go on' if self.history.ended else 'start'}: {error}"

    def _meet(self) -> None:
        """Know the nodes that an earlier supervisor has left: what they have written may not be here yet."""
        with contextlib.suppress(EngineError):
            self.job.session.adopt(self.plan)
            self.met = True

    def _carry(self) -> JobResult:
        """Launch generation after generation until one ends the job."""
        try:
            ended = self._take_over()
        except EngineLost as error:
            return JobResult(Outcome.STOPPED, BY_USER) if self.stops() else JobResult(Outcome.LOST, str(error))
        while True:
            if ended is None:
                if self.stops():
                    return JobResult(Outcome.STOPPED, BY_USER)
                try:
                    self.met = True
                    self.nodes.bring_up(self.history.ended[-1].generation + 1 if self.history.ended else 0)
                except EngineError as error:
                    if self.stops():
                        return JobResult(Outcome.STOPPED, BY_USER)
                    if not self.history.ended:
                        raise
                    if isinstance(error, EngineLost):
                        return JobResult(Outcome.LOST, str(error))
                    return JobResult(Outcome.FAILED, f"the job cannot go on: {error}")
                if self.stops():
                    return JobResult(Outcome.STOPPED, BY_USER)
                ended = self._note(self._next_generation().watch())
            if ended.cause:
                self.patterns.renew()
                decision = decide(self.spec, self.history.ended, self._search)
                self.emit(events.RestartDecided(decision.restart, decision.why, decision.delay))
                if not decision.restart:
                    return JobResult(Outcome.FAILED, decision.why)
                if self.job.sleep(decision.delay):
                    return JobResult(Outcome.STOPPED, BY_USER)
            elif ended.word != Outcome.RESCALED:
                return JobResult(ended.word, ended.why)
            ended = None

    def _search(self, pattern: str, text: str) -> bool:
        """Whether a rule's pattern is in what a worker wrote; none is where the job is to stop, which must not wait."""
        return not self.stops() and self.patterns.search(pattern, text)

    def _take_over(self) -> GenerationResult | None:
        """Go on with what an earlier supervisor left: a generation whose workers run, or one that has just ended."""
        if self.history.running < 0:
            return self.history.ended[-1] if self.history.ended else None
        self.met = True
        self.emit(events.TakenOver(self.history.running))
        self.files.generation = self.plan.generation
        generation = self._generation()
        generation.restore(self.history.exits, self.history.stopping, self.history.states)
        self.job.patiently(generation.adopt, EngineLost, events.EngineLost)
        return self._note(generation.watch())

    def _next_generation(self) -> Generation:
        """Fence off all older workers, and make ready to launch the plan."""
        number = self.plan.generation
        self.files.generation = number
        self.job.write(lambda: self.files.fence(number))
        self.emit(events.GenerationStarting(number, self.plan.nodes, self.plan.world_size, self.plan.port))
        return self._generation()

    def _generation(self) -> Generation:
        return Generation(self.job, self.plan, self.history.furthest, self.nodes)

    def _note(self, ended: GenerationResult) -> GenerationResult:
        noted = self.emit(events.GenerationEnded(**vars(ended)))
        self.history.ended.append(noted)
        return noted
