"""Ctrl-C and SIGTERM of commands that supervise a job."""

from __future__ import annotations

import signal
import threading
from typing import Any

from orchestrate import console
from orchestrate.job.spec import JobSpec


def count(spec: JobSpec) -> Any:
    """Count Ctrl-C and SIGTERM as requests to stop, and ignore SIGHUP; return a function that returns the count."""
    seen: list[int] = []

    def note(number: int, _: object) -> None:
        seen.append(number)
        first = f"stopping: workers have {spec.grace:g} s to exit; press Ctrl-C again to kill them"
        console.print_later(first if len(seen) == 1 else "killing the workers")

    threading.Thread(target=console.print_queued, daemon=True).start()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, note)
    signal.signal(signal.SIGHUP, lambda *_: None)
    return lambda: len(seen)
