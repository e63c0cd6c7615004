"""Logging of the orchestrator: to runs/JOB/orchestrate.log for a job, and to stderr on request."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from orchestrate.console import clean, print_message
from orchestrate.files.folder import replacing_links

LOGGER = logging.getLogger("orchestrate")
LOGGER.addHandler(logging.NullHandler())
LOGGER.setLevel(logging.CRITICAL)
LOGGER.propagate = False  # programs that import this package add their own handlers
LEVELS = ("debug", "info", "warning", "error", "critical")


_redactors: list[Callable[[str], str]] = []  # of the jobs that are being logged


class _Formatter(logging.Formatter):
    """One line per message, without secrets and control characters."""

    converter = staticmethod(time.gmtime)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """Format a record without its traceback, which takes more lines."""
        return super().formatMessage(record).replace("\n", "\\n")

    def format(self, record: logging.LogRecord) -> str:
        """Format a record with its traceback."""
        text = super().format(record)
        for hide in _redactors:
            text = hide(text)
        return clean(text)


class _Console(logging.Handler):
    """Prints messages to stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a message."""
        print_message(self.format(record))


class _File(logging.StreamHandler):  # type: ignore[type-arg]  # not generic in Python 3.10
    """Writes to a file; if the disk is full, only the message is lost."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Ignore the error: the job continues."""


@contextlib.contextmanager
def shown(level: str) -> Iterator[None]:
    """Print messages of this level and above within a `with` block; warn about an invalid level. Empty: print none."""
    if level and level.lower() not in LEVELS:
        print_message(f"warning: LOGLEVEL is {ascii(level)}, not one of {', '.join(LEVELS)}; ignoring it")
        level = ""
    with contextlib.ExitStack() as stack:
        if level:
            stack.enter_context(_installed(_Console(level.upper()), "%(levelname)s %(name)s: %(message)s"))
        yield


@contextlib.contextmanager
def kept(path: Path, hide: Callable[[str], str]) -> Iterator[None]:
    """Append all messages to a file within a `with` block; `hide` removes secrets from texts, there and on stderr."""
    file = open(path, "a", encoding="utf-8", errors="backslashreplace", opener=replacing_links)  # noqa: SIM115
    _redactors.append(hide)
    try:
        with _installed(_File(file), "%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s: %(message)s"):
            yield
    finally:
        _redactors.remove(hide)
        with contextlib.suppress(OSError):  # unwritten data, if the disk is full
            file.close()


@contextlib.contextmanager
def _installed(handler: logging.Handler, template: str) -> Iterator[None]:
    before = LOGGER.level
    handler.setFormatter(_Formatter(template, "%Y-%m-%dT%H:%M:%S"))
    LOGGER.addHandler(handler)
    LOGGER.setLevel(min(before, handler.level or logging.DEBUG))
    try:
        yield
    except Exception:
        LOGGER.debug("ended with an error", exc_info=True)
        raise
    finally:
        LOGGER.removeHandler(handler)
        LOGGER.setLevel(before)
