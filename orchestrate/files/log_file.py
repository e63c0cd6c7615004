"""What the orchestrator itself does, by `logging`: for a job in runs/JOB/orchestrate.log, and on stderr on demand."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from orchestrate.console import clean, say

LOGGER = logging.getLogger("orchestrate")
LOGGER.addHandler(logging.NullHandler())
LOGGER.setLevel(logging.CRITICAL)
LOGGER.propagate = False  # a program that imports us adds a handler of its own
LEVELS = ("debug", "info", "warning", "error", "critical")


_masks: list[Callable[[str], str]] = []  # of the jobs whose messages are being logged


class _Formatter(logging.Formatter):
    """One line for each message, without secrets and without anything that steers a terminal."""

    converter = staticmethod(time.gmtime)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """A record without its traceback, which has lines of its own."""
        return super().formatMessage(record).replace("\n", "\\n")

    def format(self, record: logging.LogRecord) -> str:
        """A record with its traceback."""
        text = super().format(record)
        for hide in _masks:
            text = hide(text)
        return clean(text)


class _Said(logging.Handler):
    """Prints messages as all others for a person."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a message."""
        say(self.format(record))


class _File(logging.StreamHandler):  # type: ignore[type-arg]  # Python 3.10 has it without one
    """Writes to a file; a full disk costs the message alone."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Say nothing: the job goes on."""


@contextlib.contextmanager
def shown(level: str) -> Iterator[None]:
    """Print messages from a level on within a `with` block; tell if there is no such level. No level: print none."""
    if level and level.lower() not in LEVELS:
        say(f"warning: LOGLEVEL is {ascii(level)}, not one of {', '.join(LEVELS)}; ignoring it")
        level = ""
    with contextlib.ExitStack() as stack:
        if level:
            stack.enter_context(_handled(_Said(level.upper()), "%(levelname)s %(name)s: %(message)s"))
        yield


@contextlib.contextmanager
def kept(path: Path, hide: Callable[[str], str]) -> Iterator[None]:
    """Append all messages to a file within a `with` block; `hide` takes secrets out of a text, there and on stderr."""
    file = open(path, "a", encoding="utf-8", errors="backslashreplace", opener=_opener)  # noqa: SIM115
    _masks.append(hide)
    try:
        with _handled(_File(file), "%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s: %(message)s"):
            yield
    finally:
        _masks.remove(hide)
        with contextlib.suppress(OSError):  # what a full disk did not take
            file.close()


@contextlib.contextmanager
def _handled(handler: logging.Handler, form: str) -> Iterator[None]:
    before = LOGGER.level
    handler.setFormatter(_Formatter(form, "%Y-%m-%dT%H:%M:%S"))
    LOGGER.addHandler(handler)
    LOGGER.setLevel(min(before, handler.level or logging.DEBUG))
    try:
        yield
    except Exception:
        LOGGER.debug("ends with an error", exc_info=True)
        raise
    finally:
        LOGGER.removeHandler(handler)
        LOGGER.setLevel(before)


def _opener(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)
