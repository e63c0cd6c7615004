"""How long a worker's own work takes, by the clock of the device that does it."""

from collections.abc import Callable
from typing import Any

import torch


class Stopwatch:
    """Measures spans of work on a device.

    A GPU runs its kernels after the calls that launch them, so the CPU's `clock` (in seconds) would measure the
    launches. Events in the GPU's stream mark the ends of a span instead, and nothing waits for them before `read`.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float]) -> None:
        self.on_gpu, self.clock = device.type == "cuda", clock
        self.began: Any = None
        self.spans: list[tuple[Any, Any]] = []  # pairs of events, or of seconds

    def start(self) -> None:
        """Start a span here, instead of one that was not stopped."""
        self.began = self._mark()

    def stop(self) -> None:
        """Stop the span here."""
        self.spans.append((self.began, self._mark()))

    def read(self) -> float:
        """Seconds in all spans since the last call; a GPU is waited for as far as the end of the last span."""
        spans, self.spans = self.spans, []
        if not self.on_gpu:
            return sum(end - start for start, end in spans)
        if spans:
            spans[-1][1].synchronize()
        return sum(start.elapsed_time(end) for start, end in spans) / 1000

    def _mark(self) -> Any:
        """This moment: of the clock, or of the GPU's stream when it comes to it."""
        if not self.on_gpu:
            return self.clock()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
