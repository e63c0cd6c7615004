"""One launch of all workers: from the first start to the last exit, and its result."""

from __future__ import annotations

import contextlib
from dataclasses import replace

from orchestrate.engines.base import Stop
from orchestrate.errors import EngineError
from orchestrate.plan.plan import Plan
from orchestrate.record import events, report
from orchestrate.record.outcomes import LOST_EXIT_CODE, Cause, GenerationResult, Outcome, WorkerExit
from orchestrate.spec.causes import Reason
from orchestrate.supervise import hang, stacks
from orchestrate.supervise.checkpoint_events import Saves
from orchestrate.supervise.context import BY_MAX_RUN, BY_SCHEDULER, BY_USER, ENGINE_TIMEOUT, JobContext
from orchestrate.supervise.diagnosis import traits
from orchestrate.supervise.diagnosis.root_cause import (
    PEER_FAILURE_WINDOW,
    TIMEOUT,
    diagnose,
    find_root_cause,
    is_peer_failure,
)
from orchestrate.supervise.diagnosis.tracebacks import before_dump, excerpt
from orchestrate.supervise.isolation_check import WorldCheck
from orchestrate.supervise.job_files import CONTEXT, LAST_LINES, REMOVED_AFTER
from orchestrate.supervise.nodes import Nodes
from orchestrate.supervise.policy import CRASH_LOOP_SECONDS
from orchestrate.supervise.stopping import Stopping

FAILED, RESCALED, REMOVED = "a worker failed", "a node is back", "its run directory was removed"
PARTITION_TIMEOUT = 5.0  # seconds that a node may be disconnected from the network
LOADED_SECONDS = 600.0  # a script that has run for longer can be loaded, even if it reports no progress
DUMP_TIMEOUT = 15.0  # seconds for workers to print their stacks, even on a busy machine
MAX_ENGINE_LOSSES = 50  # number of times that the engine may be lost during one generation
# Seconds after a failure until workers on GPUs are killed: a worker that waits in NCCL does not handle SIGTERM.
NCCL_STOP_TIMEOUT = 5.0
WATCH_INTERVAL = 1.0  # seconds between two looks at what the workers are doing, if that is shown


class Generation:
    """Follows the workers of one plan."""

    def __init__(self, job: JobContext, plan: Plan, furthest: int, nodes: Nodes) -> None:
        """`furthest` is the highest step of earlier generations; `nodes` knows their hosts, and when one is back."""
        self.job, self.plan, self.emit, self.nodes = job, plan, job.emit, nodes
        self.spec, self.files, self.stops, self.clock = job.spec, job.files, job.stops, job.clock
        self.furthest = furthest
        self.running = {worker.rank for worker in plan.workers}
        self.launched = False
        self.awaited: set[int] | None = None  # workers that have not started; None once all have
        self.noted = 0.0  # time when `awaited` last changed, or infinity once reported
        self.losses = 0  # number of times that the engine was lost
        self.ends: list[events.WorkerEnded] = []
        self.known: dict[int, Reason] = {}  # by rank: reasons that exit codes do not show
        self.engine_lost = ""  # the error when the engine was lost
        self.hung: Cause | None = None
        self.stopping: Stopping | None = None  # while they run, and are not to stop
        self.handled_stops = 0  # number of the user's stop requests handled so far
        self.failing = float("inf")  # when the others are stopped after a failure
        self.started = self.clock.monotonic()  # start of this generation; later, of its first worker
        self.saves = Saves(job)
        self.hang_detector = hang.HangDetector(job, self.spec.hang_after) if self.spec.hang_after else None
        self.world = WorldCheck(job, plan)
        self.there = self.started  # when the run directory was last seen
        self.watched = 0.0  # when what the workers are doing was last shown
        self.troubles: dict[str, tuple[str, float]] = {}  # by node: kind of trouble, start time
        self.boundary: object = None  # the checkpoints when a missing node came back

    @property
    def why(self) -> str:
        """Why the workers are being stopped; empty while they are not."""
        return self.stopping.why if self.stopping else ""

    # --- taking over from another supervisor

    def restore(self, exits: list[events.WorkerEnded], stopping: str, states: dict[int, str]) -> None:
        """Restore the state of an earlier supervisor: exits, why it stopped the workers, process states in a hang."""
        self.launched = True
        if states := {rank: state for rank, state in states.items() if rank in self.running}:
            self.hung = self._find_hang_cause(states, {})
        for event in [event for event in exits if event.rank in self.running]:
            if event.known:  # the supervisor's own finding, while the worker was still running
                self.known[event.rank] = event.known
            else:
                self.running.discard(event.rank)
                self.world.ended(event.rank, event.use)
            self.ends.append(event)
        if stopping or self.hung or any(end.exit_code for end in self.ends):
            self._stop(stopping or FAILED)

    def adopt(self) -> None:
        """Find running workers, started by another supervisor or before the engine was lost."""
        if self.stopping:
            self.stopping.sent = None
            self.stopping.extend(self.clock.monotonic())
        for rank in self.job.session.adopt(self.plan) & self.running:  # not known to their nodes, which are up
            self.known[rank] = Reason.ENGINE_LOST if self.engine_lost else Reason.INTERRUPTED
            self._ended(WorkerExit(rank, LOST_EXIT_CODE))

    # --- following it

    def watch(self) -> GenerationResult:
        """Follow the workers until all have exited."""
        while self.running and not (self.stopping and self.clock.monotonic() >= self.stopping.give_up):
            try:
                self._launch()
                self._step()
            except EngineError as error:
                self.emit(events.EngineLost(str(error)))
                self.engine_lost = str(error)
                self.losses += 1
                if self.losses > MAX_ENGINE_LOSSES or not self._reconnect():
                    return self._result(Outcome.LOST, str(error))
                if self.hung and not self.why:  # the engine was lost during the stack dump
                    self._stop(FAILED)
        if self.running:
            nodes = {rank: self.plan.workers[rank].node for rank in sorted(self.running)}
            self.emit(events.WorkersLost(tuple(nodes)))
            try:
                self.job.session.discard(set(nodes.values()))
            except EngineError as error:
                self.emit(events.NodesLeft(str(error)))
            if not self.ends:  # an earlier supervisor may have recorded some
                self.ends = [events.WorkerEnded(*item, LOST_EXIT_CODE, stopping=True) for item in nodes.items()]
        return self._outcome()

    def _outcome(self) -> GenerationResult:
        """Return the result of a generation whose workers have ended."""
        if self.why in (BY_USER, BY_MAX_RUN):
            if self.stopping and self.stopping.killed:
                ranks, grace = report.name_ranks(sorted(self.stopping.killed)), self.spec.grace
                self.job.warn(f"{ranks} did not end after SIGTERM: killed after the grace period of {grace:g} s")
            return self._result(Outcome.STOPPED, self.why)
        if self.why == RESCALED and not any(end.exit_code and not end.stopping for end in self.ends):
            return self._result(Outcome.RESCALED, self.why)
        if self.why == REMOVED:
            return self._result(Outcome.FAILED, self.why)
        cause = self._cause() if self.why != BY_SCHEDULER and (self.why or self.hung) else None
        if self.job.evicted() and (not cause or cause.cause == Reason.TERMINATED):  # workers may end well, but early
            return self._result(Outcome.REQUEUED, BY_SCHEDULER)
        if cause:
            return self._result(Outcome.FAILED, FAILED, cause)
        if self.spec.require_communication and (why := self.world.missing()):
            return self._result(Outcome.FAILED, why)
        return self._result(Outcome.SUCCEEDED, "finished")

    def _reconnect(self) -> bool:
        """Wait for the engine to answer again, and find the workers; return False if it does not."""
        deadline, before = self.clock.monotonic() + ENGINE_TIMEOUT, self.job.requests()
        while self.clock.monotonic() < deadline:
            if self.job.sleep(0.5, before):  # also for a request while nodes were asked
                return False
            try:
                self.adopt()
            except EngineError:
                continue
            self.emit(events.EngineBack())
            return True
        return False

    def _launch(self) -> None:
        """Start the workers, once."""
        if not self.launched:
            self.launched = True
            self.job.session.start(self.plan, self.job.is_over)
            self.emit(events.GenerationStarted(self.plan.generation, self.plan.placement.packages))
            self._stop_if_over()  # some workers may not have been started then
            self.awaited, self.noted = set(), self.clock.monotonic()

    def _step(self) -> None:
        if self.stopping and (signal := self.stopping.due()):
            self.job.session.stop(signal)
            self.stopping.sent = signal
        seen = self.job.session.wait(timeout=0.1)
        for end in seen.exits:
            if end.rank in self.running:
                self._ended(end)
        self._stop_if_failing()
        now = self.clock.monotonic()
        if self.stopping and now > self.stopping.kill_at and self.stopping.escalate(now):
            self.emit(events.WorkersStopping(self.why, kill=True))
        self._check_started(seen.starting)
        self._stop_if_over()
        self._stop_if_removed(now)
        self.job.copies.check()
        if self.clock.monotonic() > self.watched + WATCH_INTERVAL:
            self.watched = self.clock.monotonic()
            if self.job.usage.wanted:
                self.job.usage.record(self.job.session.activity())
        if self.job.usage.wants_stacks:
            self.job.usage.record_stacks(self.job.session.stacks())
        self.saves.step()
        self._check_troubles(seen.troubles)
        if self.why or self.hung:
            return
        self.world.step()
        if self.hang_detector and self.hang_detector.hung(bool(self.troubles)):
            self._handle_hang()
        elif not self.troubles and self.nodes.are_back():
            self._rescale_at_checkpoint()

    def _check_started(self, starting: set[int]) -> None:
        """Report workers that the others have awaited for a second, and when all have started."""
        if self.awaited is None or self.why:
            return
        awaited = starting & self.running
        if awaited and awaited == self.running:
            self.started = self.clock.monotonic()  # exclude the time in which nodes import packages
        if not awaited:
            self.awaited = None
            self.emit(events.WorkersStarted())
        elif awaited != self.awaited:
            self.awaited, self.noted = awaited, self.clock.monotonic()
        elif awaited != self.running and self.clock.monotonic() > self.noted + 1.0:
            self.noted = float("inf")
            self.emit(events.WorkersAwaited(tuple(sorted(awaited))))

    def _ended(self, end: WorkerExit) -> None:
        self.running.discard(end.rank)
        node = self.plan.workers[end.rank].node
        ending, state = bool(self.why or self.hung), self.stopping
        stopping = ending and end.stopping
        event = self.emit(events.WorkerEnded(end.rank, node, end.code, stopping=stopping, use=end.use))
        self.world.ended(end.rank, end.use)
        if not state or not state.kill or state.killed_late:  # other killed workers do not show a cause
            self.ends.append(event)
        if state and stopping and end.code == LOST_EXIT_CODE and self.clock.monotonic() > state.patient:
            state.killed.append(end.rank)
        if end.code and not ending:
            timeout = is_peer_failure(self.files.last_lines(end.rank), TIMEOUT)
            self.failing = min(self.failing, self.clock.monotonic() + PEER_FAILURE_WINDOW * timeout)
        self._stop_if_failing()

    def _stop_if_over(self) -> None:
        """Stop the workers on request, and once `max_run` is reached."""
        if self.stops() > self.handled_stops:
            self.handled_stops = self.stops()
            self._stop(BY_USER)
        if not self.why and (why := self.job.over()):
            self._stop(why)

    def _stop_if_removed(self, now: float) -> None:
        """Stop the workers if the run directory is away for a while."""
        if not self.files.gone():
            self.there = now
        elif not self.why and now > self.there + REMOVED_AFTER:
            self._stop(REMOVED)

    def _stop_if_failing(self) -> None:
        """Stop the other workers after a failure; after a timeout, first let the others that wait time out as well.

        The worker that remains is the one that they waited for.
        """
        due = self.clock.monotonic() >= self.failing or (self.failing < float("inf") and len(self.running) < 2)
        if due and not self.why and not self.hung:
            self._stop(FAILED)

    def _stop(self, why: str) -> None:
        now = self.clock.monotonic()
        state = self.stopping = self.stopping or Stopping(why, self.spec.grace, now)
        state.kill = state.kill or self.stops() > 1 or bool(self.hung and state.why == FAILED)
        state.extend(now)
        with contextlib.suppress(OSError):  # a full disk; the nodes stop the workers anyway
            self.files.fence(self.plan.generation, over=True)
        self.emit(events.WorkersStopping(why, kill=state.kill))
        if state.why == FAILED and self.plan.gpus:
            state.kill_at = min(state.kill_at, now + NCCL_STOP_TIMEOUT)

    def _check_troubles(self, found: dict[str, str]) -> None:
        """Track nodes in trouble: wait for paused ones, and treat a partition as a failure after a timeout."""
        troubles = {node: what for node, what in found.items() if node in self.plan.nodes}
        for node in self.troubles.keys() - troubles.keys():
            if any(self.plan.workers[rank].node == node for rank in self.running):  # otherwise it counts as lost
                self.emit(events.NodeWell(node))
            del self.troubles[node]
        for node, what in troubles.items():
            if self.troubles.get(node, ("", 0.0))[0] != what:
                self.emit(events.NodeInTrouble(node, what))
                self.troubles[node] = what, self.clock.monotonic()
            cut_off = what == "partition" and self.clock.monotonic() - self.troubles[node][1] > PARTITION_TIMEOUT
            ranks = [rank for rank in self.running if self.plan.workers[rank].node == node]
            if cut_off and ranks and not self.why and not self.hung:
                rank = min(ranks)
                self.known[rank] = Reason.PARTITION
                end = events.WorkerEnded(rank, node, LOST_EXIT_CODE, stopping=False, known=Reason.PARTITION)
                self.ends.append(self.emit(end))
                self._stop(FAILED)

    def _rescale_at_checkpoint(self) -> None:
        """Stop the gang at the next checkpoint to continue with all nodes, since a missing one is back."""
        saved = self.files.saved()
        if self.boundary is None:
            self.emit(events.NodeBack())
            self.boundary = saved
        elif saved != self.boundary:
            self._stop(RESCALED)

    def _handle_hang(self) -> None:
        """Make every worker print its stacks, find the worker that the others wait for, and kill them."""
        states = self.job.session.activity()
        letters = {rank: doing.state for rank, doing in states.items() if rank in self.running}
        self.emit(events.HangFound(letters, self.spec.hang_after or 0.0))
        self.hung = self._hang_cause(min(self.running), "the job hung; the engine was lost before the cause was found")
        found = self.job.session.stacks()
        self.job.session.stop(Stop.DUMP)
        deadline = self.clock.monotonic() + DUMP_TIMEOUT
        frozen = {rank for rank, letter in letters.items() if letter in hang.FROZEN}  # cannot print stacks
        while self.running - frozen and self.clock.monotonic() < deadline:
            for end in self.job.session.wait(timeout=0.1).exits:
                self._ended(end)
        self.hung = self._find_hang_cause(letters, {rank: stack.text for rank, stack in found.items()})
        self._stop(FAILED)

    def _find_hang_cause(self, states: dict[int, str], found: dict[int, str]) -> Cause:
        """Return the cause of a hang: a worker whose script has failed, or the one that the others wait for.

        `found` are the stacks of the workers' processes, by rank.
        """
        logs = {rank: self.files.text(rank) for rank in sorted(states)}
        stands = {rank: stacks.parse_position(log) for rank, log in logs.items()}
        for rank, stand in stands.items():
            if hang.has_failed(logs[rank], stand):
                return self._diagnosis(WorkerExit(rank, 1), None, hang.STUCK)
        rank, what = hang.late(states, stands)
        what += hang.child(found.get(rank, ""))
        starting = " in init_process_group\n" in logs.get(rank, "")
        return self._hang_cause(rank, f"the job hung: rank {rank} on {self.plan.workers[rank].node} {what}", starting)

    def _hang_cause(self, rank: int, summary: str, starting: bool = False) -> Cause:
        return Cause(
            rank=rank,
            node=self.plan.workers[rank].node,
            exit_code=LOST_EXIT_CODE,
            cause=Reason.HANG,
            summary=summary,
            hint=(starting and traits.shared_file(self.plan))
            or "the log of each rank ends with its stacks; hang_after in the job file sets the time limit",
            last_lines=self.files.last_lines(rank, main=True),
            log=str(self.files.log(rank)),
        )

    # --- its result

    def _cause(self) -> Cause:
        if self.hung:
            return self.hung
        window = min(PEER_FAILURE_WINDOW, self.spec.grace)  # exits after that are our own kills
        exit, known = find_root_cause(self.ends, self.files.last_lines, window)
        known, node = known or self.known.get(exit.rank), self.plan.workers[exit.rank].node
        if not known:
            try:
                known = self.job.session.explain(exit, node)
            except EngineError:
                known = Reason.ENGINE_LOST
        if self.engine_lost and known in (Reason.NODE_LOST, Reason.NODE_STOPPED, Reason.HOST_LOST):
            known = Reason.ENGINE_LOST
        return self._diagnosis(exit, known)

    def _diagnosis(self, exit: WorkerExit, known: Reason | None, what: str = "") -> Cause:
        """Return the cause of a worker's end; `what` describes that instead of its exit code."""
        lines, context = self.files.last_lines(exit.rank), self.files.last_lines(exit.rank, CONTEXT)
        if what:  # the stacks that we have asked for show nothing more
            context = [*before_dump(context)]
        if what or lines == context[-LAST_LINES:]:  # else there is a dump of stacks
            lines = excerpt(context, LAST_LINES)
        log, host = str(self.files.log(exit.rank)), self.nodes.hosts.get(self.plan.workers[exit.rank].node, "")
        return diagnose(self.plan, exit, known, lines, log, host, context, what)

    def _result(self, outcome: Outcome, why: str, cause: Cause | None = None) -> GenerationResult:
        lasted = self.clock.monotonic() - self.started
        self.saves.end()
        (step, behind), began = self.files.last_step(self.furthest, self.clock), self.files.began
        if began is not None and began <= (self.files.first or 0) < self.furthest:
            self.job.warn(
                f"generation {self.plan.generation} began at step {began} again, although step {self.furthest} had "
                "been reached: the script has not continued from a checkpoint"
            )
        if step or self.furthest:
            progress = step > self.furthest or behind
        elif self.saves.last:
            progress = self.saves.happened
        else:
            progress = lasted > CRASH_LOOP_SECONDS  # the script writes neither metrics nor checkpoints
        trained = step > self.furthest or self.saves.happened or lasted > LOADED_SECONDS
        if cause and cause.cause == Reason.SCRIPT and trained:
            cause = replace(cause, cause=Reason.ERROR)
        return GenerationResult(
            generation=self.plan.generation,
            outcome=outcome,
            why=why,
            cause=cause,
            lasted=round(lasted, 3),
            step=step,
            versions=self.world.versions(),
            exchanged={rank: use.exchanged for rank, use in sorted(self.world.uses.items())},
            isolated="" if cause or outcome == Outcome.STOPPED else self.world.advice(),
            progress=progress,
        )
