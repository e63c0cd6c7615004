"""One launch of all workers: from the first start to the last end, and what came of it."""

from __future__ import annotations

import contextlib
import time

from orchestrate.engines.base import Stop
from orchestrate.errors import EngineError
from orchestrate.job import events
from orchestrate.job.outcomes import LOST, Cause, GenerationResult, ObservedExit, Outcome, Reason, WorkerExit
from orchestrate.job.plan import Plan
from orchestrate.supervise import hang
from orchestrate.supervise.diagnosis import PEER_FAILURE_WINDOW, TIMEOUT, blame, complains, diagnose
from orchestrate.supervise.nodes import Nodes
from orchestrate.supervise.policy import CRASH_LOOP_SECONDS
from orchestrate.supervise.running import ENGINE_TIMEOUT, Running

BY_USER, BY_MAX_RUN = "stopped by the user", "max_run is over"
FAILED, RESCALED, REMOVED = "a worker failed", "a node is back", "its run directory was removed"
PARTITION_TIMEOUT = 5.0  # seconds that a node may be cut off from the network
DUMP_TIMEOUT = 15.0  # seconds at most in which workers print their stacks, on a machine that is busy
MAX_ENGINE_LOSSES = 50  # times that the engine may go away during one generation
# Seconds after a failure in which workers on GPUs end: one that waits in NCCL never handles SIGTERM.
NCCL_STOP_TIMEOUT = 5.0
REPORT_TIMEOUT = 5.0  # seconds that nodes have, after the grace period, to say that their workers have ended


class Generation:
    """Follows the workers of one plan."""

    def __init__(self, job: Running, plan: Plan, furthest: int, nodes: Nodes) -> None:
        """`furthest` is the highest step of earlier generations; `nodes` tells where they are, and when one is back."""
        self.job, self.plan, self.emit, self.nodes = job, plan, job.emit, nodes
        self.spec, self.files, self.stops = job.spec, job.files, job.stops
        self.best = furthest
        self.running = {worker.rank for worker in plan.workers}
        self.launched = False
        self.awaited: set[int] | None = None  # workers that have not started yet; None if all have
        self.noted = 0.0  # when they were last found to be others, or infinity once they are reported
        self.losses = 0  # how often the engine was away
        self.ends: list[ObservedExit] = []
        self.known: dict[int, Reason] = {}  # rank: what we know of its end besides the exit code
        self.engine_lost = ""  # what the engine said when it was lost
        self.hung: Cause | None = None
        self.why = ""  # why the workers were asked to end
        self.requested, self.sent = 0, 0  # orders to the workers: 1 to end, 2 to die
        self.heard = 0  # how many of the user's requests to stop have been passed on
        self.give_up = float("inf")
        self.failing = float("inf")  # when the others are stopped after a failure
        self.killing = float("inf")  # when those that have not ended by then are killed
        self.late = False  # whether that has been done: one of them may be the worker that the others waited for
        self.started = time.monotonic()  # of this generation; later, of its first worker
        self.saved = self.files.saved()
        self.watch_for_hangs = _Watch(self) if self.spec.hang_after else None
        self.troubles: dict[str, tuple[str, float]] = {}  # node: what, since when
        self.boundary: object = None  # the checkpoints at the time when a missing node was back

    # --- after another supervisor

    def restore(self, exits: list[events.WorkerEnded], stopping: str, states: dict[int, str]) -> None:
        """Know what an earlier supervisor knew: which workers ended, why they were to, their states in a hang."""
        self.launched = True
        if states := {rank: state for rank, state in states.items() if rank in self.running}:
            self.hung = self._late(states)
        for event in [event for event in exits if event.rank in self.running]:
            if event.known:  # found out by us, while the worker was still there
                self.known[event.rank] = event.known
            else:
                self.running.discard(event.rank)
            self.ends.append(ObservedExit(event.seconds, WorkerExit(event.rank, event.exit_code), event.stopping))
        if stopping or self.hung or any(end.exit.code for end in self.ends):
            self._stop(stopping or FAILED)

    def adopt(self) -> None:
        """Find the workers that another supervisor, or we before the engine went away, have started."""
        self.sent = 0
        if self.why:
            self._give_time()
        strangers = self.job.session.adopt(self.plan) & self.running
        if strangers:  # on nodes that live, but do not know them
            for rank in strangers:
                self.known[rank] = Reason.ENGINE_LOST if self.engine_lost else Reason.INTERRUPTED
                self._ended(WorkerExit(rank, LOST))

    # --- to its end

    def watch(self) -> GenerationResult:
        """Follow the workers until all have ended."""
        while self.running and time.monotonic() < self.give_up:
            try:
                self._launch()
                self._step()
            except EngineError as error:
                self.emit(events.EngineLost(str(error)))
                self.engine_lost = str(error)
                self.losses += 1
                if self.losses > MAX_ENGINE_LOSSES or not self._reconnect():
                    return self._result(Outcome.LOST, str(error))
                if self.hung and not self.why:  # it was lost while we asked where the workers stand
                    self._stop(FAILED)
        if self.running:
            nodes = {self.plan.workers[rank].node for rank in self.running}
            self.emit(events.WorkersLost(tuple(sorted(self.running))))
            try:
                self.job.session.discard(nodes)
            except EngineError as error:
                self.emit(events.NodesLeft(str(error)))
            if not self.ends:  # of which another supervisor may have known more
                self.ends = [
                    ObservedExit(self.emit.seconds(), WorkerExit(rank, LOST), True) for rank in sorted(self.running)
                ]
        if self.why in (BY_USER, BY_MAX_RUN):
            return self._result(Outcome.STOPPED, self.why)
        if self.why == RESCALED and not any(end.exit.code and not end.ours for end in self.ends):
            return self._result(Outcome.RESCALED, self.why)
        if self.why == REMOVED:
            return self._result(Outcome.FAILED, self.why)
        if self.why or self.hung:
            return self._result(Outcome.FAILED, FAILED, self._cause())
        return self._result(Outcome.SUCCEEDED, "finished")

    def _reconnect(self) -> bool:
        """Wait for an engine that went away, and find the workers again; False if it stays away."""
        deadline = time.monotonic() + ENGINE_TIMEOUT
        while time.monotonic() < deadline:
            if self.job.sleep(0.5):
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
            self.job.session.start(self.plan)
            self.emit(events.GenerationStarted(self.plan.generation, self.plan.placement.packages))
            self.awaited, self.noted = set(), time.monotonic()

    def _step(self) -> None:
        if self.sent < self.requested:
            self.job.session.stop(Stop.KILL if self.requested > 1 else Stop.TERMINATE)
            self.sent = self.requested
        seen = self.job.session.wait(timeout=0.1)
        for end in seen.exits:
            if end.rank in self.running:
                self._ended(end)
        self._stop_if_failing()
        if time.monotonic() > self.killing:
            self._kill()
        self._look_for_started(seen.starting)
        if self.stops() > self.heard:
            self.heard = self.stops()
            self._stop(BY_USER)
        if self.spec.max_run and self.emit.seconds() > self.spec.max_run and not self.why:
            self._stop(BY_MAX_RUN)
        if not self.why and self.files.gone():
            self._stop(REMOVED)
        self._look_for_trouble(seen.troubles)
        if self.why or self.hung:
            return
        if self.watch_for_hangs and self.watch_for_hangs.hung(bool(self.troubles)):
            self._hang()
        elif not self.troubles and self.nodes.are_back():
            self._at_a_checkpoint()

    def _look_for_started(self, starting: set[int]) -> None:
        """Report the workers that others have waited for a second, and that all have started."""
        if self.awaited is None or self.why:
            return
        awaited = starting & self.running
        if awaited and awaited == self.running:
            self.started = time.monotonic()  # the time in which nodes import says nothing about the script
        if not awaited:
            self.awaited = None
            self.emit(events.WorkersStarted())
        elif awaited != self.awaited:
            self.awaited, self.noted = awaited, time.monotonic()
        elif awaited != self.running and time.monotonic() > self.noted + 1.0:
            self.noted = float("inf")
            self.emit(events.WorkersAwaited(tuple(sorted(awaited))))

    def _ended(self, end: WorkerExit) -> None:
        self.running.discard(end.rank)
        node = self.plan.workers[end.rank].node
        stopping = bool(self.why or self.hung)
        ours = stopping and end.asked
        self.emit(events.WorkerEnded(end.rank, node, end.code, stopping=ours))
        if self.requested < 2 or self.late:  # what else we have killed says nothing
            self.ends.append(ObservedExit(self.emit.seconds(), end, ours))
        if end.code and not stopping:
            timeout = complains(self.files.last_lines(end.rank), TIMEOUT)
            self.failing = min(self.failing, time.monotonic() + PEER_FAILURE_WINDOW * timeout)
        self._stop_if_failing()

    def _stop_if_failing(self) -> None:
        """Stop the others after a failure; after a timeout, let those that wait as well run into it first.

        The worker that is left to stop is the one that they waited for.
        """
        due = time.monotonic() >= self.failing or (self.failing < float("inf") and len(self.running) < 2)
        if due and not self.why and not self.hung:
            self._stop(FAILED)

    def _stop(self, why: str) -> None:
        self.why = self.why or why
        self.requested = 2 if self.stops() > 1 or (self.hung and self.why == FAILED) else max(1, self.requested)
        with contextlib.suppress(OSError):  # a full disk; the nodes stop what runs all the same
            self.files.fence(self.plan.generation, over=True)
        self.emit(events.WorkersStopping(why, kill=self.requested > 1))
        if self.why == FAILED and self.plan.gpus:
            self.killing = min(self.killing, time.monotonic() + NCCL_STOP_TIMEOUT)
        self._give_time()

    def _kill(self) -> None:
        """Kill the workers that have not ended."""
        self.killing = float("inf")
        if self.requested < 2:
            self.requested, self.late = 2, True
            self.emit(events.WorkersStopping(self.why, kill=True))
            self._give_time()

    def _give_time(self) -> None:
        self.give_up = time.monotonic() + REPORT_TIMEOUT + (0 if self.requested > 1 else self.spec.grace)

    def _look_for_trouble(self, found: dict[str, str]) -> None:
        """Note nodes that are paused, for which we wait, and those that are cut off, for which we do not wait long."""
        troubles = {node: what for node, what in found.items() if node in self.plan.nodes}
        for node in self.troubles.keys() - troubles.keys():
            if any(self.plan.workers[rank].node == node for rank in self.running):  # else it has been given up
                self.emit(events.NodeWell(node))
            del self.troubles[node]
        for node, what in troubles.items():
            if self.troubles.get(node, ("", 0.0))[0] != what:
                self.emit(events.NodeInTrouble(node, what))
                self.troubles[node] = what, time.monotonic()
            cut_off = what == "partition" and time.monotonic() - self.troubles[node][1] > PARTITION_TIMEOUT
            ranks = [rank for rank in self.running if self.plan.workers[rank].node == node]
            if cut_off and ranks and not self.why and not self.hung:
                rank = min(ranks)
                self.known[rank] = Reason.PARTITION
                self.emit(events.WorkerEnded(rank, node, LOST, stopping=False, known=Reason.PARTITION))
                self.ends.append(ObservedExit(self.emit.seconds(), WorkerExit(rank, LOST), False))
                self._stop(FAILED)

    def _at_a_checkpoint(self) -> None:
        """A missing node is back: once the job has saved, stop it to go on with all nodes."""
        saved = self.files.saved()
        if self.boundary is None:
            self.emit(events.NodeBack())
            self.boundary = saved
        elif saved != self.boundary:
            self._stop(RESCALED)

    def _hang(self) -> None:
        """Have every worker print where it stands; find out whom they wait for; kill them."""
        states = self.job.session.doing()
        letters = {rank: doing.state for rank, doing in states.items() if rank in self.running}
        self.emit(events.HangFound(letters, self.spec.hang_after or 0.0))
        self.hung = self._stuck(min(self.running), "the job hung; the engine was lost before it was known where")
        self.job.session.stop(Stop.DUMP)
        deadline = time.monotonic() + DUMP_TIMEOUT
        frozen = {rank for rank, letter in letters.items() if letter in hang.FROZEN}  # they print nothing
        while self.running - frozen and time.monotonic() < deadline:
            for end in self.job.session.wait(timeout=0.1).exits:
                self._ended(end)
        self.hung = self._late(letters)
        self._stop(FAILED)

    def _late(self, states: dict[int, str]) -> Cause:
        """Whom the others wait for, by the workers' states and by what they have printed of where they stand."""
        rank, what = hang.late(states, {rank: hang.stand(self.files.text(rank)) for rank in sorted(states)})
        return self._stuck(rank, f"the job hung: rank {rank} on {self.plan.workers[rank].node} {what}")

    def _stuck(self, rank: int, summary: str) -> Cause:
        return Cause(
            rank=rank,
            node=self.plan.workers[rank].node,
            exit_code=LOST,
            cause=Reason.HANG,
            summary=summary,
            hint="the log of each rank ends with its stacks; hang_after in the job file says when a job counts as hung",
            last_lines=self.files.last_lines(rank),
            log=str(self.files.log(rank)),
        )

    # --- what came of it

    def _cause(self) -> Cause:
        if self.hung:
            return self.hung
        window = min(PEER_FAILURE_WINDOW, self.spec.grace)  # later, it is we who kill
        exit, known = blame(self.ends, self.files.last_lines, window)
        known, node = known or self.known.get(exit.rank), self.plan.workers[exit.rank].node
        if not known:
            try:
                known = self.job.session.explain(exit, node)
            except EngineError:
                known = Reason.ENGINE_LOST
        if self.engine_lost and known in (Reason.NODE_LOST, Reason.NODE_STOPPED):
            known = Reason.ENGINE_LOST
        words, log = self.files.last_lines(exit.rank), str(self.files.log(exit.rank))
        return diagnose(self.plan, exit, known, words, log, self.nodes.hosts.get(node, ""))

    def _result(self, word: Outcome, why: str, cause: Cause | None = None) -> GenerationResult:
        lasted = time.monotonic() - self.started
        step, saved = self.files.step(), self.files.saved()
        if step or self.best:
            progress = step > self.best
        elif saved:
            progress = saved != self.saved
        else:
            progress = lasted > CRASH_LOOP_SECONDS  # it leaves nothing to measure it by
        return GenerationResult(
            generation=self.plan.generation,
            word=word,
            why=why,
            cause=cause,
            lasted=round(lasted, 3),
            step=step,
            progress=progress,
        )


class _Watch:
    """Finds out that a job hangs: nothing was written for the whole time, and nobody computed in its last half."""

    def __init__(self, generation: Generation) -> None:
        self.files, self.job = generation.files, generation.job
        self.patience = generation.spec.hang_after or float("inf")
        self.looked = self.active = self.asked = time.monotonic()
        self.activity: object = None
        self.cpu: dict[int, float] = {}  # seconds by rank, when the nodes were asked last

    def hung(self, excused: bool) -> bool:
        """Whether the job has done nothing for too long; time in which it is `excused` does not count."""
        now = time.monotonic()
        if now - self.looked < min(1.0, self.patience / 20):
            return False
        self.looked = now
        activity = self.files.activity()
        if excused or activity != self.activity:
            self.activity, self.active, self.cpu = activity, now, {}
        if now - self.active < self.patience / 2 or now - self.asked < self.patience / 10:
            return False  # asking the nodes is not free
        before, passed = self.cpu, now - self.asked
        self.cpu = {rank: doing.cpu for rank, doing in self.job.session.doing().items()}
        self.asked = now
        if any(seconds - before.get(rank, seconds) > hang.IDLE * passed for rank, seconds in self.cpu.items()):
            self.active, self.cpu = now, {}
        return bool(before and self.cpu) and now - self.active > self.patience
