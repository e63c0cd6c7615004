"""Ctrl-C and SIGTERM of commands that supervise a job."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

from orchestrate import console, errors, patience
from orchestrate.spec.spec import JobSpec

# Seconds that the command still waits after the second request: at least, more for each node, and at most.
HURRY, HURRY_PER_NODE, MOST = 10.0, 0.5, 60.0
AGAIN = 1.0  # seconds until it is interrupted again, if it waits for its own threads then


def interruptible() -> None:
    """Let SIGTERM and SIGHUP end what prepares a job as Ctrl-C does, with all that it has started."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup sets it
        signal.signal(signal.SIGHUP, signal.default_int_handler)


def end_at_once() -> None:
    """Let what `count` has counted end a command whose job has ended: its output may not be read any longer."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            continue
        signal.signal(number, lambda *_: os._exit(errors.INTERRUPTED))


def count(spec: JobSpec) -> Any:
    """Count Ctrl-C and SIGTERM as requests to stop, and ignore SIGHUP; return a function that returns the count.

    SIGTERM is often sent only once, so the end of the grace period counts as the second request. If the command is
    still waiting some seconds after that, for an engine, a disk or a store, Abandoned is raised in the main thread.
    """
    seen: list[int] = []
    most = min(MOST, HURRY + HURRY_PER_NODE * (1 + spec.trainers + spec.spares))

    def note(number: int, _: object) -> None:
        seen.append(number)
        if len(seen) == 1:
            console.print_later(f"stopping: workers have {spec.grace:g} s to exit; press Ctrl-C again to kill them")
            if number == signal.SIGTERM:
                patience.limit(spec.grace, AGAIN)
        elif len(seen) == 2:
            console.print_later("killing the workers")
            patience.limit(most, AGAIN)

    def late(number: int, frame: object) -> None:
        if len(seen) > 1:
            raise patience.Abandoned
        note(number, frame)

    threading.Thread(target=console.print_queued, daemon=True).start()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, note)
    signal.signal(patience.SIGNAL, late)
    signal.signal(signal.SIGHUP, lambda *_: None)
    return lambda: len(seen)
