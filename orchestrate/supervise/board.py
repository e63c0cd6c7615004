"""TensorBoard events of a job's metrics, in its run directory: `tensorboard --logdir runs` shows all jobs."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from orchestrate.files.lines import Lines
from orchestrate.files.paths import METRICS, JobPaths
from orchestrate.job.metrics import measurements
from orchestrate.view.progress import Progress

log = logging.getLogger(__name__)

INTERVAL = 2.0  # seconds between two reads of metrics.jsonl
MAX_READ = 8 << 20  # bytes of it per read
MAX_NAMES, MAX_NAME = 200, 100  # metrics of a job, and characters of a name
LARGEST = 3.4e38  # of a float with 32 bits
PATTERN = "events.out.tfevents.*"


class Board:
    """Writes metrics as they come; writes nothing if the package tensorboard is not installed."""

    def __init__(self, paths: JobPaths, hide: Callable[[str], str]) -> None:
        """Continue after the metrics that an earlier supervisor has seen; `hide` removes secrets from their names."""
        self.paths, self.hide, self.lines = paths, hide, Lines()
        self.available = importlib.util.find_spec("tensorboard") is not None
        self.writer: Any = None
        self.names: set[str] = set()
        self.step: int | None = None  # of the last row of metrics.jsonl
        self.count, self.due = 0, 0.0  # lines with metrics; time of the next read
        if self.available and any(paths.root.glob(PATTERN)):
            with contextlib.suppress(OSError), paths.folder.open(METRICS) as file:
                self.lines.skip(file, 0)

    def heard(self, found: Progress) -> None:
        """Take what a line of rank 0 says about its progress, unless the script writes metrics.jsonl.

        Lines are numbered: they have no step, or one of a bar, which may start again.
        """
        if self.available and found.metrics and not self.paths.metrics.exists():
            self.count += 1
            self._write(self.count if found.step is None or found.bar else found.step, found.metrics, None)

    def catch_up(self, end: bool = False) -> None:
        """Take what the script has written to metrics.jsonl, if it is time, or at the `end` of the job."""
        if not self.available or (time.monotonic() < self.due and not end):
            return
        self.due = time.monotonic() + INTERVAL
        with contextlib.suppress(OSError), self.paths.folder.open(METRICS) as file:
            for values in measurements(self.lines.new(file, MAX_READ)):
                step = values.pop("step", None)
                values.pop("total_steps", None)
                step = step if type(step) is int and 0 <= step < 1 << 63 else (self.step or 0) + 1
                self._write(step, values, self.step)
                self.step = step
        if self.writer:
            self.writer.flush()
        if end and self.writer:
            self.writer.close()

    def _write(self, step: int, values: Mapping[str, Any], before: int | None) -> None:
        numbers = {self._name(name): float(value) for name, value in values.items() if _drawable(value)}
        self.names.update(list(numbers)[: MAX_NAMES - len(self.names)])
        if not (numbers := {name: value for name, value in numbers.items() if name in self.names}):
            return
        try:
            self._add(step, numbers, before)
        except Exception:  # a version with another interface, a full disk
            log.warning("no TensorBoard events", exc_info=True)
            self.available = False

    def _add(self, step: int, numbers: Mapping[str, float], before: int | None) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # only here: it takes time to import
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        if not self.writer:
            self.writer = EventFileWriter(str(self.paths.root))
        if before is not None and step < before:  # the job continues from a checkpoint, and repeats the steps after it
            session = SessionLog(status=SessionLog.START)
            self.writer.add_event(Event(wall_time=time.time(), step=step, session_log=session))
        values = [Summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        self.writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def _name(self, name: str) -> str:
        return self.hide(name)[:MAX_NAME].encode(errors="replace").decode()


def _drawable(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < LARGEST and math.isfinite(value)
