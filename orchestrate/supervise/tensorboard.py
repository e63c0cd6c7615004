"""TensorBoard events of a job's metrics, in its run directory: `tensorboard --logdir runs` shows all jobs."""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

from orchestrate.files.folder import content
from orchestrate.files.lines import Lines
from orchestrate.files.paths import METRICS
from orchestrate.host import records
from orchestrate.record.metrics import TOTAL, measurements
from orchestrate.record.paths import JobPaths
from orchestrate.record.progress import Epochs, Progress
from orchestrate.supervise.tfevents import EventFile

log = logging.getLogger(__name__)

INTERVAL = 2.0  # seconds between two writes
LAST_TIMEOUT = 10.0  # seconds to write the last metrics
MAX_QUEUED = 2000  # lines of output that wait to be written, of up to 26 KB each
MAX_STEP = 1 << 62
MAX_READ = 8 << 20  # bytes that are left out if there are more
MAX_SECONDS, LAST_SECONDS = 0.2, 2.0  # of work in a turn, and in the last one
MAX_FILE = 64 << 20  # bytes of events
MAX_NAMES, MAX_NAME = 200, 100  # metrics of a job, and characters of a name
LARGEST = 3.4e38  # of a float with 32 bits
PATTERN = "events.out.tfevents.*"


class Board:
    """Writes metrics as they come."""

    def __init__(self, paths: JobPaths, hide: Callable[[str], str]) -> None:
        """Continue after what an earlier supervisor has written; `hide` removes secrets from the names of metrics."""
        self.paths, self.hide, self.lines = paths, hide, Lines()
        self.works = True
        self.file: EventFile | None = None
        self.names: set[str] = set()
        self.step = -1.0  # of the job, the last one that is known
        self.count = 0  # the step of the last metrics, whether it is that of the job or a number
        self.epochs = Epochs()
        self.queue: queue.SimpleQueue[Progress] = queue.SimpleQueue()
        self.ending = threading.Event()
        self.thread: threading.Thread | None = None
        if any(paths.root.glob(PATTERN)):
            self.step = math.inf  # the job may repeat steps
            with contextlib.suppress(OSError), paths.folder.open(METRICS) as file:
                self.lines.skip(file, 0)
            with contextlib.suppress(OSError, ValueError):
                self.lines.offset = min(self.lines.offset, max(0, int(content(paths.written_metrics))))
        self.written = self.lines.offset  # bytes of metrics.jsonl

    def __enter__(self) -> Board:
        """Write in a thread from now on, which a slow disk may keep waiting."""
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Write the last metrics, and end the thread."""
        if self.thread:
            self.ending.set()
            self.thread.join(LAST_TIMEOUT)

    def heard(self, found: Progress) -> None:
        """Record the progress in a line of rank 0."""
        if self.works and found.metrics and self.queue.qsize() < MAX_QUEUED:
            if len(found.metrics) > MAX_NAMES:
                found = replace(found, metrics=dict(islice(found.metrics.items(), MAX_NAMES)))
            self.queue.put(found)

    def _run(self) -> None:
        ended = False
        while not ended and self.works:
            ended = self.ending.wait(INTERVAL)
            try:
                self.catch_up(LAST_SECONDS if ended else MAX_SECONDS)
                if ended and self.file:
                    self.file.close()
            except OSError:  # a full disk, or a job that writes without end
                log.warning("no TensorBoard events", exc_info=True)
                self.works = False
                if self.file:
                    with contextlib.suppress(OSError):
                        self.file.close()

    def catch_up(self, seconds: float = LAST_SECONDS) -> None:
        """Write what was taken since the last call, and what the script has written to metrics.jsonl, for some time.

        Lines of the output count only if the script does not write that file. Those without a step are numbered. Raises
        OSError, also if there are too many events.
        """
        until = time.monotonic() + seconds
        while not self.queue.empty() and time.monotonic() < until:
            found = self.queue.get()
            if not os.path.lexists(self.paths.shared / METRICS):
                self._heard(found)
        with contextlib.suppress(OSError), self.paths.folder.open(METRICS) as file:
            self.lines.near_end(file, MAX_READ)  # it may have been truncated
            for values in measurements(self.lines.new_while(lambda: time.monotonic() < until, file)):
                step = values.pop("step", None)
                values.pop(TOTAL, None)
                self._write(step if type(step) is int and 0 <= step < MAX_STEP else None, values)
        if self.file:
            self.file.flush()
            if self.lines.start != self.written:
                self.written = self.lines.start
                records.put(self.paths.written_metrics, str(self.written))
            if self.file.size > MAX_FILE:
                raise OSError(errno.EFBIG, "too many metrics")

    def _heard(self, found: Progress) -> None:
        """Write what a line says; steps of a bar are those of the job if it names the epoch."""
        step = self.epochs.step(found, line=True) if found.bar else found.step
        if found.bar and found.epoch is None:
            self.count, step = max(self.count, (step or 0) - 1), None
        self._write(step if step is None or step < MAX_STEP else None, found.metrics)

    def _write(self, step: int | None, values: Mapping[str, Any]) -> None:
        """Write metrics of a step of the job, or of the next number if none is known."""
        repeated = step is not None and step < self.step
        self.step = self.step if step is None else step
        self.count = self.count + 1 if step is None else step
        numbers = {self._name(name): float(value) for name, value in values.items() if _drawable(value)}
        self.names.update(list(numbers)[: MAX_NAMES - len(self.names)])
        if not (numbers := {name: value for name, value in numbers.items() if name in self.names}):
            return
        if not self.file:
            with records.pinned(self.paths.root) as run:
                self.file = EventFile(run)
        if repeated:  # the job continues from a checkpoint, and repeats the steps after it
            self.file.start(self.count)
        self.file.scalars(self.count, numbers)

    def _name(self, name: str) -> str:
        return self.hide(name)[:MAX_NAME].encode(errors="replace").decode()


def _drawable(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < LARGEST
