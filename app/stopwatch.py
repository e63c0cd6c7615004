"""Measure how long a worker's own work takes, by the clock of its device."""

from collections.abc import Callable
from typing import Any

import torch


class Stopwatch:
    """Measures spans of work on a device.

    A GPU runs kernels after the calls that launch them, so the CPU's `clock` (in seconds) would measure the launches.
    Instead, events in the GPU's stream mark the ends of a span; only `read` waits for them.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float]) -> None:
        self.on_gpu, self.clock = device.type == "cuda", clock
        self.started: Any = None
        self.spans: list[tuple[Any, Any]] = []  # pairs of events, or of seconds

    def start(self) -> None:
        """Start a span; a span that was not stopped is discarded."""
        self.started = self._mark()

    def stop(self) -> None:
        """Stop the span."""
        self.spans.append((self.started, self._mark()))

    def read(self) -> float:
        """Seconds in all spans since the last call; waits for a GPU to reach the end of the last span."""
        spans, self.spans = self.spans, []
        if not self.on_gpu:
            return sum(end - start for start, end in spans)
        if spans:
            spans[-1][1].synchronize()
        return sum(start.elapsed_time(end) for start, end in spans) / 1000

    def _mark(self) -> Any:
        """The current time, or an event that the GPU's stream reaches after the work launched so far."""
        if not self.on_gpu:
            return self.clock()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
