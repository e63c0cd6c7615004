"""Work on several files at the same time, in threads that do not keep the process from exiting."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from typing import ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")

POLL_INTERVAL = 0.1  # seconds between two questions whether to stop
STOP_TIMEOUT = 2.0  # seconds for work to end by itself once it is asked to
AT_ONCE = 4  # files; hides the latency of a request per small file, while large ones share the bandwidth


class Stopped(Exception):
    """The caller asked to stop."""


def each(work: Callable[[T], None], items: Iterable[T], stopped: Callable[[], bool]) -> None:
    """Call `work` for all items; raises Stopped once `stopped()`, or the first exception of `work`."""
    pending, taking, failures = iter(items), threading.Lock(), list[Exception]()

    def run() -> None:
        while not failures:
            with taking:
                item = next(pending, pending)
            if item is pending:
                return
            try:
                if stopped():
                    raise Stopped
                work(item)  # type: ignore[arg-type]
            except Exception as error:
                failures.append(error)

    threads = [threading.Thread(target=run, daemon=True) for _ in range(AT_ONCE)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except BaseException:  # Ctrl-C
        failures.append(Stopped())
        raise
    if failures:
        raise failures[0]


def stoppable(stopped: Callable[[], bool], function: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """Return the result of a function; raises Stopped soon after `stopped()`, even if a request in it takes minutes.

    The request then goes on, in a thread that does not keep the process from exiting.
    """
    done, until = started(function, *arguments, **options), math.inf
    while not wait([done], POLL_INTERVAL).done:
        if stopped():
            until = min(until, time.monotonic() + STOP_TIMEOUT)
        if time.monotonic() > until:
            raise Stopped
    return done.result()


def interruptible(function: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """Return the result of a function that would keep the main thread from handling Ctrl-C until it returns.

    So does the library of the stores, for minutes if a store does not respond. Another thread calls it then.
    """
    if threading.current_thread() is not threading.main_thread():
        return function(*arguments, **options)
    return started(function, *arguments, **options).result()


def started(function: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> Future[T]:
    """Call a function in a thread that does not keep the process from exiting; return its future result."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(function(*arguments, **options))
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return done
