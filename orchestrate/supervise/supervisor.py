"""The supervisor runs a job's generations until an outcome is reached. It makes all decisions, and prints nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace

from orchestrate.errors import AllocationLost, EngineError, EngineLost, OrchestrateError
from orchestrate.patience import Abandoned
from orchestrate.plan.plan import Plan
from orchestrate.record import events
from orchestrate.record.outcomes import GenerationResult, JobResult, Outcome
from orchestrate.record.report import NO_CHECKPOINTS, WORTH
from orchestrate.spec.patterns import Patterns
from orchestrate.supervise.context import BY_REQUEUES, BY_USER, JobContext, Over, Requeued
from orchestrate.supervise.generation import Generation
from orchestrate.supervise.nodes import Nodes
from orchestrate.supervise.policy import Decision, decide

ABANDONED = "they did not end in time after a request to stop"


class Supervisor:
    """Runs one job from the state in its events to its end."""

    def __init__(self, job: JobContext, keep: Callable[[Plan], None]) -> None:
        """`keep` saves the plan of each new generation."""
        self.job, self.history = job, job.history
        self.spec, self.emit, self.files = job.spec, job.emit, job.files
        self.nodes = Nodes(job, self.history.hosts, keep)
        logs = [rule["log"] for rule in self.spec.rules if "log" in rule]
        self.patterns = Patterns(logs, job.warn)
        self.result = self.history.outcome
        self.warned = False  # that the script starts over
        self.connected = False  # whether the session knows the nodes, from `up` or `adopt`

    @property
    def plan(self) -> Plan:
        """The plan of the newest generation."""
        return self.nodes.plan

    def supervise(self) -> JobResult:
        """Run the job and always remove its nodes; raises OrchestrateError if it could not start or continue."""
        failure = None
        result = self.result
        if self.history.running < 0 and (result or self.history.recent) and not self.job.without_nodes:
            self._reconnect()
        try:
            self.job.copies.begin(self.job.is_over)
            if result is None:
                self.result = result = self._run_generations()
                self.emit(events.OutcomeDecided(result.outcome, result.why))
        except OrchestrateError as error:
            failure = error
            self.emit(events.OutcomeDecided(Outcome.FAILED, self.failure_reason(error)))
        except Abandoned:
            raise
        except BaseException:  # including Requeued
            self.nodes.end_background()
            with contextlib.suppress(EngineError):  # nodes stay if their files could not be copied
                self.job.session.down(0)
            raise
        self.nodes.end_background()
        self.emit(events.NodesStopping())
        left = ""
        try:
            grace = 0 if self.job.hurried() else self.spec.grace
            if self.connected:
                self.job.session.down(grace, self.job.hurried)
            elif self.plan.placement.cluster:
                if not self.job.without_nodes:
                    self.job.session.adopt(self.plan)
                    self.job.session.down(grace, self.job.hurried)
            else:  # left by another supervisor; this one has started no nodes
                self.job.engine.remove(self.plan.job_id, grace)
            self.emit(events.NodesDown())
        except OrchestrateError as error:
            left = str(error)
            self.emit(events.NodesLeft(left))
        if failure:
            raise failure
        assert result
        return replace(result, left=left)

    def abandon(self) -> JobResult:
        """Return the result of a job that was asked to stop and has not ended in time; its nodes may be left."""
        if self.result is None:
            self.result = JobResult(Outcome.STOPPED, BY_USER)
            self.emit(events.OutcomeDecided(Outcome.STOPPED, BY_USER))
        self.emit(events.NodesLeft(ABANDONED))
        return replace(self.result, left=ABANDONED)

    def failure_reason(self, error: OrchestrateError) -> str:
        """Return the reason of a job that an error ended."""
        return f"could not {'continue' if self.history.recent else 'start'}: {error}"

    def _reconnect(self) -> None:
        """Connect to nodes that an earlier supervisor left: their files may not have been copied yet."""
        self.connected = True
        with contextlib.suppress(EngineError):  # those that do not respond now may do so at the end
            self.job.session.adopt(self.plan)

    def _run_generations(self) -> JobResult:
        """Run generations until one of them ends the job."""
        try:
            ended = self._take_over()
            while True:
                ended = ended or self._run_generation()
                if ended.cause:
                    self._decide_restart()
                elif ended.outcome == Outcome.REQUEUED and self.job.evicted():
                    raise self._requeued()
                elif ended.outcome not in (Outcome.RESCALED, Outcome.REQUEUED):
                    return JobResult(ended.outcome, ended.why)
                ended = None
        except Over as over:
            return over.result

    def _decide_restart(self) -> None:
        """Wait for the delay of a restart; raises Over if there is none."""
        self.patterns.renew()
        decision = decide(self.spec, self.history.recent, self._search)
        if self.emit.full:
            decision = Decision(False, "its record is full")
        self.emit(events.RestartDecided(decision.restart, decision.why, decision.delay))
        if not decision.restart:
            raise Over(JobResult(Outcome.FAILED, decision.why))
        if not self.warned and self._starts_over():
            self.warned = True
            self.job.warn(f"{NO_CHECKPOINTS}, it starts over")
        self.job.go_on()
        if self.job.sleep(decision.delay):
            self.job.go_on()

    def _starts_over(self) -> bool:
        """Whether the first generation that failed after a while has left nothing from which the script continues."""
        long = [ended for ended in self.history.ended if ended.cause and ended.lasted > WORTH]
        return long == [self.history.ended[-1]] and not self.files.saved()

    def _run_generation(self) -> GenerationResult:
        """Run the next generation to its end; raises Over, and EngineError if the first one cannot start."""
        self.job.go_on()
        try:
            self.connected = True
            number = self.history.ended[-1].generation + 1 if self.history.ended else 0
            self.nodes.bring_up(number, first=not self.history.recent)
        except EngineError as error:
            self.job.go_on()
            if not self.history.recent:
                raise
            if isinstance(error, AllocationLost):
                self.job.warn(f"{error}: the job goes back to the queue, for another one")
                raise self._requeued() from None
            if isinstance(error, EngineLost):
                raise Over(JobResult(Outcome.LOST, str(error))) from None
            raise Over(JobResult(Outcome.FAILED, f"the job cannot continue: {error}")) from None
        self.job.go_on()
        return self._record(self._next_generation().watch())

    def _requeued(self) -> Exception:
        """Return what ends this supervisor: the job continues in another allocation, or has had as many as it may."""
        limit = self.spec.slurm.get("requeues")
        if limit and sum(ended.outcome == Outcome.REQUEUED for ended in self.history.recent) > int(limit):
            return Over(JobResult(Outcome.STOPPED, f"{BY_REQUEUES} is {limit}"))
        return Requeued()

    def _search(self, pattern: str, text: str) -> bool:
        """Whether a rule's pattern matches a worker's output; false, without a search, if the job is to stop."""
        return not self.job.stops() and self.patterns.search(pattern, text)

    def _take_over(self) -> GenerationResult | None:
        """Continue an earlier supervisor's generation; return its result, or None if there was none."""
        if self.history.running < 0:
            return self.history.recent[-1] if self.history.recent else None
        self.connected = True
        self.emit(events.TakenOver(self.history.running))
        self.files.begin(self.plan.generation)
        generation = self._generation()
        generation.restore(self.history.exits, self.history.stopping, self.history.states)
        try:
            self.job.retry(generation.adopt, EngineLost, events.EngineLost)
        except EngineLost as error:
            self.job.go_on()
            raise Over(JobResult(Outcome.LOST, str(error))) from None
        return self._record(generation.watch())

    def _next_generation(self) -> Generation:
        """Fence off older workers, and create the next generation."""
        number = self.plan.generation
        self.files.begin(number)
        self.job.write(lambda: self.files.fence(number))
        self.emit(events.GenerationStarting(number, self.plan.nodes, self.plan.world_size, self.plan.port))
        return self._generation()

    def _generation(self) -> Generation:
        return Generation(self.job, self.plan, self.history.furthest, self.nodes)

    def _record(self, ended: GenerationResult) -> GenerationResult:
        noted = self.emit(events.GenerationEnded(**vars(ended)))
        self.history.ended.append(noted)
        return noted
