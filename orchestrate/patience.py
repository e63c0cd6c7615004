"""How long a command waits at most, once it was asked to stop: an engine, a disk or a store may never respond."""

from __future__ import annotations

import signal
import threading

SIGNAL = signal.SIGALRM  # sent to the main thread, whose calls it interrupts
_calm = threading.Event()  # set once no more signals may be sent


class Abandoned(BaseException):
    """Raised in the main thread by the handler of SIGNAL: the command stops waiting."""


def limit(seconds: float, again: float) -> None:
    """Send SIGNAL after some seconds, and then `again` and again, until `calm` is called; replaces an earlier limit."""
    global _calm
    calm()
    _calm = threading.Event()
    threading.Thread(target=_send, args=(_calm, seconds, again), daemon=True).start()


def calm() -> None:
    """Send no more signals: the command waits for nothing anymore, or goes on to its end."""
    _calm.set()


def _send(ended: threading.Event, seconds: float, again: float) -> None:
    main = threading.main_thread().ident
    while not ended.wait(seconds):
        if main is not None:
            signal.pthread_kill(main, SIGNAL)
        seconds = again
