"""A job that has ended, as pages show it."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import shlex
import time
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import yaml

from orchestrate.dataclass import dataclass
from orchestrate.errors import UsageError
from orchestrate.files.lines import Lines, last
from orchestrate.files.paths import LOGS, METRICS, log
from orchestrate.host import records
from orchestrate.node.messages import checks
from orchestrate.pages.curves import Curve, Progress, progress
from orchestrate.pages.spans import LOST, OTHER, WORKING, Moment, Span, moments, spans
from orchestrate.plan.plan import Plan, pluralize
from orchestrate.record import run_dir
from orchestrate.record.events import Event
from orchestrate.record.logs import MARK
from orchestrate.record.metrics import MAX_METRICS, MAX_ROWS, measurements
from orchestrate.record.paths import JobPaths
from orchestrate.record.progress import MAX_LINE, Epochs, Reader
from orchestrate.record.progress import Progress as Printed
from orchestrate.spec.redact import Mask, redacted
from orchestrate.spec.sizes import format_bytes
from orchestrate.spec.spec import FIELDS, JobSpec

SHOWN = 0.05  # seconds lost that are listed: less is 0.0 s
FEW = 10  # points in metrics.jsonl; of curves with fewer, the log may have more
LOG = re.compile(r"rank-([0-9]{1,7})\.log")
MAX_RANKS = 8  # logs that are searched for metrics, if rank 0 has printed none
MAX_LOG = 4 << 20  # first bytes of a log that are searched for metrics
MAX_SECONDS = 2.0  # of CPU time for the logs of a job: a line of three bytes can take ten microseconds


@dataclass(frozen=True)
class Run:
    """A job: its report, and what pages show besides."""

    name: str
    report: dict[str, Any]  # the content of report.json
    spans: list[Span]
    moments: list[Moment]
    progress: Progress
    curves: dict[str, Curve]  # metrics to draw, by name
    axis: str  # what they are drawn over
    command: str
    settings: dict[str, str]  # keys of the job file that differ from the default
    machine: str
    patched: bool  # whether changes.patch has what differs from the commit

    @property
    def seconds(self) -> float:
        """The duration of the job."""
        return self.spans[-1].end if self.spans else float(self.report["duration_s"])

    @cached_property
    def _working(self) -> dict[str, float]:
        """The seconds in which the script ran, by what they were spent on."""
        return self.progress.divided(sum(span.seconds for span in self.spans if span.kind == WORKING))

    @property
    def times(self) -> list[tuple[str, float]]:
        """What the time was spent on, and for how many seconds; first the new steps, then what was lost."""
        names = {
            "steps": "running the script",
            "saving": "saving checkpoints",
            "waiting": "waiting for the slowest worker",
            "repeated": f"repeating {pluralize(self.progress.repeated, 'step')} after restarts",
        }
        lost = {text: sum(span.seconds for span in self.spans if span.kind == kind) for kind, text in LOST.items()}
        lost = {text: seconds for text, seconds in lost.items() if seconds >= SHOWN}
        found = {text: self._working[part] for part, text in names.items()} | lost
        return [(text, seconds) for text, seconds in found.items() if seconds > 0]

    @property
    def not_counted(self) -> str:
        """Return what happened while the script ran that does not count as goodput."""
        names = {"repeated": "repeated steps", "saving": "saving", "waiting": "waiting"}
        *first, last = [text for part, text in names.items() if self._working[part] > 0] or [""]
        return " and ".join([", ".join(first), last]) if first else last

    @property
    def marks(self) -> list[tuple[float, float, Moment]]:
        """Return checkpoints and trouble with their places on a bar of the job's time, in percent, and their times.

        At most one of a kind is in 0.1 %.
        """
        found: dict[tuple[str, float], tuple[float, Moment]] = {}
        for moment in self.moments:
            for at in moment.times if moment.kind != OTHER else ():
                percent = round(max(0.0, min(100.0, 100 * at / self.seconds)), 1) if self.seconds else 0.0
                found.setdefault((moment.kind, percent), (at, moment))
        return [(percent, *mark) for (_, percent), mark in found.items()]

    @property
    def torch(self) -> str:
        """The versions of torch that workers loaded."""
        found = self.report.get("torch")
        versions = map(str, found if isinstance(found, list) else ())
        return " and ".join(version for version in versions if not checks.version(version))

    @property
    def survived(self) -> list[dict[str, Any]]:
        """The failures after which the job went on."""
        failures: list[dict[str, Any]] = self.report["failures"]
        return failures[:-1] if self.report["root_cause"] else failures

    @property
    def goodput(self) -> float | None:
        """The share of the time in which the script ran, without steps that were repeated, saving and waiting.

        From 0 to 1; None if the script was restarted and reports no steps, which it may have repeated.
        """
        if self.progress.generations > 1 and not self.progress.numbered:
            return None
        return self._working["steps"] / self.seconds if self.seconds else 0.0

    @property
    def exchanged(self) -> str:
        """How much data a worker exchanges in a step, compared with an all-reduce; empty if unknown.

        An all-reduce of S bytes sends 2 (N - 1) / N S bytes from each of N workers, and receives as many (Patarasuk
        and Yuan, "Bandwidth optimal all-reduce algorithms", 2009).
        """
        known = [count for count in self.report.get("exchanged_bytes", ()) if count]
        workers, steps = self.report["world_size"], self.progress.latest
        clear = self.progress.numbered and self.progress.restarts + 1 == self.report["generations"]
        if workers < 2 or len(known) < workers or not steps or not clear:
            return ""
        each = sum(known) / len(known) / steps
        size = each / 2 / (2 * (workers - 1) / workers)
        return (
            f"Each worker sends and receives about {format_bytes(int(each))} per step, "
            f"like an all-reduce of {format_bytes(int(size))}."
        )


def load(paths: JobPaths, report: dict[str, Any] | None = None) -> Run:
    """Read a job that has ended, or is about to end with this report.

    Raises UsageError for others, or if its files are damaged.
    """
    spec, plan = run_dir.load_for_display(paths)
    if not (data := report or run_dir.ended(paths)):
        raise UsageError(f"{paths.root.name} has not ended", f"python -m orchestrate attach {paths.root.name}")
    mask = spec.mask()
    found, curves, axis = curves_of(paths, spec, int(data["generations"]))
    history = _history(paths)
    command = shlex.join(map(mask, plan.command))
    return Run(
        name=paths.root.name,
        report=data,
        spans=spans(history),
        moments=moments(history),
        progress=found,
        curves=curves,
        axis=axis,
        command=command,
        settings=_set(spec, mask),
        machine=_machine(plan),
        patched=paths.patch.exists(),
    )


def _history(paths: JobPaths) -> list[Event]:
    """Return the events of a job, none for a copy whose events are damaged; raises UsageError for another."""
    try:
        return run_dir.history(paths)
    except UsageError:
        if records.find(paths.root):
            raise
        return []


def curves_of(paths: JobPaths, spec: JobSpec, generations: int) -> tuple[Progress, dict[str, Curve], str]:
    """Return what metrics.jsonl says about a job, its curves so far or those of its output, and what they go over."""
    mask, found = spec.mask(), progress(_rows(paths), generations)
    curves, axis = found.drawn(mask), "step" if found.numbered else "order in metrics.jsonl"
    points = max(map(len, curves.values()), default=0)
    if points < FEW:
        printed = progress(_printed(paths, mask, Reader(spec.metrics)), generations)
        drawn = printed.drawn()
        if max(map(len, drawn.values()), default=0) > points:
            return found, drawn, "step" if printed.numbered else "order in the log"
    return found, curves, axis


def _rows(paths: JobPaths) -> Iterator[dict[str, Any]]:
    with contextlib.suppress(OSError), paths.folder.open(METRICS) as file:
        yield from measurements(last(file, MAX_METRICS, MAX_ROWS))


def _printed(paths: JobPaths, mask: Mask, reader: Reader) -> Iterator[dict[str, Any]]:
    """Yield the metrics in a log: in lines and full progress bars, and those that change in the other states of a bar.

    That is the log of rank 0, or, if the job has no patterns of its own, of the first of some ranks that has any.
    Of logs that take long to search, only the beginning is searched.
    """
    end = time.thread_time() + MAX_SECONDS
    names = (LOG.fullmatch(name) for name, _ in paths.folder.entries(LOGS))
    ranks = sorted(int(name[1]) for name in names if name)
    for rank in dict.fromkeys([*ranks[:1], *ranks[-1:], *ranks[:MAX_RANKS]]):
        some, epochs, last = False, Epochs(), dict[str, float]()
        for found, state in _found(paths, rank, mask, reader, end):
            if not found:
                epochs.restarted()
                continue
            some = True
            step = epochs.step(found) if found.bar else found.step
            fresh = {name: value for name, value in found.metrics.items() if not state or last.get(name) != value}
            last |= fresh
            yield fresh if step is None else {**fresh, "step": step}
        if some or reader.given:
            return


def _found(paths: JobPaths, rank: int, mask: Mask, reader: Reader, end: float) -> Iterator[tuple[Printed | None, bool]]:
    """Yield what a log says, and whether that is a state of a progress bar on its way, which repeats its metrics.

    None is for the start of another generation.
    """
    with contextlib.suppress(OSError), paths.folder.open(log(rank)) as file:
        read = Lines()
        for line in [*read.new(file, MAX_LOG), read.rest()]:
            if line.startswith(MARK):
                yield None, False
            states = mask(line.decode(errors="replace")).split("\r")
            for state in states:
                if time.thread_time() > end:
                    return
                if found := reader.parse(state[-MAX_LINE:]):
                    yield found, found.bar and len(states) > 1 and found.fraction != 1


def _set(spec: JobSpec, mask: Mask) -> dict[str, str]:
    """Return the keys of a job file that are set, without the command and values of secrets."""
    shown, default = dataclasses.replace(spec, env=redacted(spec.env, spec.secrets)), JobSpec()
    names = [key for key in FIELDS if key != "command" and getattr(shown, key) != getattr(default, key)]
    return {key: _yaml(mask.inside(_plain(getattr(shown, key)))) for key in names}


def _plain(value: Any) -> Any:
    return [*value] if isinstance(value, tuple) else value


def _yaml(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("...\n").strip()


def _machine(plan: Plan) -> str:
    memory = f", {format_bytes(plan.inventory.memory)} of memory" if plan.inventory.memory else ""
    gpus = f", {pluralize(len(plan.gpus), 'GPU')}" if plan.gpus else ""
    return f"{plan.inventory.about}, {pluralize(len(plan.inventory.cores), 'core')}{gpus}{memory}"
