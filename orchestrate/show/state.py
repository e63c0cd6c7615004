"""The state of a job as it is shown: folded from its events, output, metrics and activity. No input or output."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from orchestrate.console import clean
from orchestrate.plan.plan import Plan
from orchestrate.record import events, report
from orchestrate.record.events import Event
from orchestrate.record.metrics import TOTAL, is_number, listed, plain, shown
from orchestrate.record.outcomes import Activity
from orchestrate.record.progress import Epochs, Progress
from orchestrate.record.steps import Steps

PACES = 30  # steps whose duration is kept for each rank
EVENTS = 4  # that are shown
SHOWN_METRICS = 3
MAX_NAMES = 100  # metrics of a rank that are kept, the last ones
OF_EPOCH = " in this epoch"  # what steps of bars are called that start again
NAME = re.compile(r"[A-Za-z][\w ./-]{0,40}", re.ASCII)  # of a metric that is shown
TOGETHER = 0.01  # seconds; lines within this time were read together, and not written at this pace
MAX_CLOCK = 1e9  # seconds; what workers report may be any number
IDLE = 5.0  # seconds after which an idle worker is shown as such
BUSY = 0.05  # cores; a worker that uses less is idle


@dataclass
class Rank:
    """A worker."""

    number: int
    node: str
    state: str = "waiting"  # waiting, running, stopping, succeeded, stopped, failed
    heard: float = 0.0  # when it last wrote something or computed; all times are monotonic, in seconds
    cores: float = 0.0  # CPU seconds per second
    cpu: float = 0.0  # CPU seconds until `measured`
    measured: float = 0.0
    memory: int = 0  # bytes
    progress: Progress = field(default_factory=Progress)  # its `bar`: whether the step is that of an epoch
    paces: deque[float] = field(default_factory=lambda: deque(maxlen=PACES))  # seconds per step
    stepped: tuple[int, float] = (0, 0.0)  # its last step, and when it was reached
    epochs: Epochs = field(default_factory=Epochs)
    steps: bool = False  # whether it has reported steps; otherwise, its `progress` counts epochs, if it reports them
    exact: bool = False  # whether it has reported steps of the job, so that those of bars do not count

    @property
    def pace(self) -> float | None:
        """Mean seconds of its last steps; None if unknown."""
        return sum(self.paces) / len(self.paces) if self.paces else None

    @property
    def unit(self) -> str:
        """What its progress counts."""
        return "step" if self.steps else "epoch"

    def idle(self, now: float) -> float:
        """Seconds since it last did something, if it is running."""
        return max(0.0, now - self.heard) if self.state == "running" and self.heard else 0.0

    def hear(self, found: Sequence[Progress], now: float) -> None:
        """Record the progress in lines that it has written."""
        self.heard = now
        for one in found:
            self.record(one, now)

    def record(self, found: Progress, now: float) -> None:
        """Record progress from a line or from metrics; what it does not say stays as it is."""
        old = self.progress
        if found.of_job is not None:
            self.exact = True
        elif found.step is not None:
            of_epoch = self.epochs.over(found) > 0 or found.epoch is not None
            known = self.exact and found.total != old.total  # the bar has not the steps of the job
            found = replace(found, step=None) if known else replace(found, bar=of_epoch)
        elif found.epochs and not self.steps:
            metrics = {name: value for name, value in found.metrics.items() if name != "epoch"}
            found = replace(found, step=found.epoch, total=found.epochs, metrics=metrics)
        if not self.steps and found.step is not None and not found.epochs:
            self.steps, self.stepped = True, (0, 0.0)
            self.paces.clear()
        if found.step is not None and found.step != self.stepped[0]:
            steps, seconds = found.step - self.stepped[0], now - self.stepped[1]
            together = 0 <= seconds < TOGETHER and steps > 0
            if steps > 0 and self.stepped[1] and not together:
                self.paces.append(seconds / steps)
            self.stepped = found.step, self.stepped[1] if together else now
        self.progress = Progress(
            step=old.step if found.step is None else found.step,
            total=old.total if found.step is None else found.total,
            seconds_left=old.seconds_left if found.step is None else found.seconds_left,
            step_seconds=found.step_seconds or old.step_seconds,
            metrics=_latest(old.metrics, found.metrics),
            bar=old.bar if found.step is None else found.bar,
        )


def _latest(old: dict[str, float], new: dict[str, float]) -> dict[str, float]:
    """Metrics with new values; of too many, the last ones."""
    if not new:
        return old
    found = {**old, **new}
    return found if len(found) <= MAX_NAMES else dict(islice(found.items(), len(found) - MAX_NAMES, None))


class Work:
    """The time in which the script ran."""

    def __init__(self, since: float) -> None:
        self.since = since  # when the job began or was resumed
        self.steps = Steps(generations=0)
        self.before = 0.0  # seconds, in earlier generations
        self.began: float | None = None  # when the workers of this one started, while they run

    def start(self, now: float) -> None:
        """All workers have started."""
        self.stop(now)
        self.began = now
        self.steps.generations += 1

    def stop(self, now: float) -> None:
        """All workers have ended."""
        self.before += max(0.0, now - self.began) if self.began is not None else 0.0
        self.began = None

    def seconds(self, now: float) -> float:
        """Return the time that was spent on new steps, as reports count it."""
        working = self.before + (now - self.began if self.began is not None else 0.0)
        return self.steps.divided(working)["steps"]


class View:
    """A job and its workers."""

    def __init__(self, plan: Plan, now: float) -> None:
        """`now` is monotonic, in seconds, as in all methods."""
        self.job_id, self.began = plan.job_id, now
        self.phase, self.phase_began = "", now
        self.generation = 0
        self.events: deque[tuple[float, str]] = deque(maxlen=EVENTS)  # seconds of the job, and what happened
        self.ranks: dict[int, Rank] = {}
        self.saved: float | None = None  # when the last checkpoint was saved
        self.work = Work(now)
        self.measured: set[str] = set()  # names of metrics in metrics.jsonl
        self.planned(plan)

    def planned(self, plan: Plan) -> None:
        """Record the plan of a generation."""
        self.generation = plan.generation
        self.ranks = {worker.rank: Rank(worker.rank, worker.node) for worker in plan.workers}

    def enter(self, phase: str, now: float) -> None:
        """Begin a phase; an empty text ends it."""
        if phase != self.phase:
            self.phase, self.phase_began = phase, now

    def event(self, event: Event, now: float, age: float = 0.0) -> None:
        """Record an event of `age` seconds ago."""
        if text := report.line(event):
            self.events.append((event.seconds, clean(text.partition("\n")[0])))
        match event:
            case events.JobResumed():
                self.work = Work(now - age)
            case events.CheckpointSaved():
                self.saved = now - age
            case events.GenerationEnded():
                self.work.stop(now - age)
            case events.HangFound():
                self.work.stop(now - age - event.after)
            case events.WorkersStarted():
                self.work.start(now - age)
                for rank in self.ranks.values():
                    rank.state, rank.heard = "running", now
            case events.WorkersStopping():
                for rank in self.ranks.values():
                    rank.state = "stopping" if rank.state == "running" else rank.state
            case events.WorkerEnded() if event.rank in self.ranks:
                ended = "failed" if event.exit_code else "succeeded"
                self.ranks[event.rank].state = "stopped" if event.stopping else ended

    def hear(self, number: int, found: Sequence[Progress], now: float) -> None:
        """Record the progress in lines that a worker has written."""
        self.ranks[number].heard = now
        for one in found:
            if number == 0:  # what the script writes to metrics.jsonl is more exact
                metrics = {name: value for name, value in one.metrics.items() if name not in self.measured}
                one = replace(one, metrics=metrics)
            self._record(number, one, now)

    def _record(self, number: int, found: Progress, now: float) -> None:
        """Record the progress of a worker.

        None of the workers is idle if one gets to another step: they wait for each other in every step.
        """
        rank = self.ranks[number]
        before = rank.stepped[0]
        rank.hear([found], now)
        if rank.stepped[0] != before:
            for other in self.ranks.values():
                other.heard = now

    def activity(self, found: Mapping[int, Activity], now: float) -> None:
        """Record the activity of the workers."""
        for number, doing in found.items():
            rank = self.ranks.get(number)
            if rank is None:
                continue
            rank.memory = doing.memory
            if rank.measured and now > rank.measured:
                rank.cores = max(0.0, (doing.cpu - rank.cpu) / (now - rank.measured))
                if rank.cores > BUSY:
                    rank.heard = now
            rank.cpu, rank.measured = doing.cpu, now

    def measure(self, values: Mapping[str, Any], now: float) -> None:
        """Record a line of metrics.jsonl."""
        known = {name: float(value) for name, value in values.items() if type(value) in (int, float) and plain(value)}
        step, total = (int(value) if is_number(value := known.get(name)) else None for name in ("step", TOTAL))
        numbers = {name: value for name, value in shown(known).items() if name != "step" and NAME.fullmatch(name)}
        if 0 in self.ranks and (step is not None or numbers):
            found = Progress(step=step, total=total or self.ranks[0].progress.total, metrics=numbers)
            self.measured.update(list(numbers)[: MAX_NAMES - len(self.measured)])
            self._record(0, found, now)

    def goodput(self, now: float) -> float | None:
        """Return the share of the time that was spent on new steps, as in the report, since the last resumption.

        None if no worker has started, or if they were restarted and report no steps, which they may have repeated.
        """
        if self.work.steps.generations > 1 and not self.work.steps.numbered:
            return None
        seconds = self.work.seconds(now)
        return seconds / (now - self.work.since) if seconds and now > self.work.since else None

    @property
    def lead(self) -> Rank:
        """The worker whose progress is shown as the job's: the first that reports a step, preferably a running one."""
        stepping = [rank for rank in self.ranks.values() if rank.progress.step is not None]
        return next((rank for rank in stepping if rank.state == "running"), (stepping or [self.ranks[0]])[0])


def worst_first(ranks: Mapping[int, Rank], now: float) -> list[Rank]:
    """Sort workers by how much they need attention: failed ones, those that work while others wait, those behind.

    Then by number.
    """

    def key(rank: Rank) -> tuple[bool, bool, int, int]:
        step = rank.progress.step
        return rank.state != "failed", rank.idle(now) >= IDLE, step if step is not None else 1 << 62, rank.number

    return sorted(ranks.values(), key=key)


def some_work(ranks: Mapping[int, Rank], now: float) -> bool:
    """Whether a worker does something, for which others may wait."""
    return any(rank.state == "running" and rank.idle(now) < IDLE for rank in ranks.values())


def seconds_left(rank: Rank, now: float) -> float | None:
    """Return the seconds until a worker's last step, or the last one of an epoch, as it reports them or by its pace.

    None if unknown, and while it is idle.
    """
    progress = rank.progress
    if rank.idle(now) >= IDLE:
        return None
    if progress.seconds_left is None and progress.step is not None and progress.total and rank.pace:
        return (progress.total - progress.step) * rank.pace
    return progress.seconds_left


def status(view: View, now: float) -> str:
    """Return the progress of a job in one line: steps, time left, metrics; empty if nothing is known."""
    lead = view.lead
    progress, parts = lead.progress, []
    if progress.step is not None:
        done = f" of {progress.total:,} ({100 * (progress.fraction or 0):.0f}%)" if progress.total else ""
        parts.append(f"{lead.unit} {progress.step:,}{done}")
        if (left := seconds_left(lead, now)) is not None:
            parts.append(f"{clock(left)} left")
        parts[-1] += OF_EPOCH if progress.bar else ""
    metrics = lead.progress.metrics or (view.ranks[0].progress.metrics if 0 in view.ranks else {})
    return ", ".join([*parts, *listed(metrics)[:SHOWN_METRICS]])


def clock(seconds: float) -> str:
    """Format a duration: `7 s`, `2:05`, `1:02:05`."""
    whole = int(min(max(0.0, seconds), MAX_CLOCK))
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
