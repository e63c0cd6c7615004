"""All that is printed: data to stdout, messages for a person to stderr, without anything that steers a terminal."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import shutil
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TextIO

COMMANDS, MODULE = ("orchestrate", "torch-orchestrate"), "python -m orchestrate"
READER_LEFT = (errno.EPIPE, errno.EIO)  # a closed pipe, a closed terminal
_ESCAPES = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # colours, cursor
    r"|\x1b\][^\x07\x1b\n]*(?:\x07|\x1b\\)?"  # window title, clipboard
    r"|\x1b[@-Z\\-_]?|[\x00-\x08\x0b-\x1f\x7f-\x9f]"
)
_UNSEEN = re.compile(  # Unicode's categories Cf, Zl and Zp, but the joiner of emoji (U+200D)
    "[\u00ad\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u180e\u200b\u200c\u200e\u200f\u2028-\u202e\u2060-\u206f"
    "\ufeff\ufff9-\ufffb\U000110bd\U000110cd\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a"
    "\U000e0001\U000e0020-\U000e007f]+"
)
ANNOUNCE_AFTER = 3.0  # seconds after which what goes on now becomes a line
PROGRESS_INTERVAL = 10.0  # seconds between two lines of a worker's progress
_failures: list[OSError] = []  # why output was not written; a reader that has left is none


class _Now:
    """What goes on now."""

    text = ""
    timer: threading.Timer | None = None
    shown = float("-inf")  # when progress was last shown


_now, _lock = _Now(), threading.RLock()


class Closed(Exception):
    """Stdout takes no more, so a command that only prints has nothing left to do."""


def clean(text: str) -> str:
    """The text without control characters but newline and tab, and without those that change how it is read."""
    text = _ESCAPES.sub("", text)
    return text if text.isascii() else _UNSEEN.sub("", text)


def prepare() -> None:
    """Make printing safe: every character can be printed, and no file that is opened takes a standard stream's place.

    Call it once, when the process starts.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:  # closed: the next file to be opened would get its number
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def phase(text: str) -> None:
    """Tell what goes on now, or with no text that it is over.

    A terminal shows it at once, as a last line that is replaced. Elsewhere it becomes a line if it takes long.
    """
    if not _lock.acquire(timeout=1):  # a reader that does not read keeps another thread from printing
        return
    try:
        if text == _now.text:
            return
        if _now.timer:
            _now.timer.cancel()
        _erase()
        _now.text, _now.timer = text, None
        _draw()
        if text and not _replaces(sys.stderr):
            _now.timer = threading.Timer(ANNOUNCE_AFTER, _announce, [text])
            _now.timer.daemon = True
            _now.timer.start()
    finally:
        _lock.release()


@contextlib.contextmanager
def during(text: str) -> Iterator[None]:
    """Tell what goes on within a `with` block, or a function that this decorates."""
    phase(text)
    try:
        yield
    finally:
        phase("")


def progress(text: str, show: Callable[[str], None]) -> None:
    """Show a worker's progress bar as the last line of a terminal; elsewhere `show` gets it now and then."""
    if _replaces(sys.stderr):
        phase(text)
    elif text and time.monotonic() > _now.shown + PROGRESS_INTERVAL:
        _now.shown = time.monotonic()
        show(text)


def _announce(text: str) -> None:
    if text == _now.text:
        say(text)


def _replaces(stream: TextIO | None) -> bool:
    """Whether a line on it can be replaced: not if a reader of stdout may write to the same terminal, such as grep."""
    with contextlib.suppress(ValueError, OSError, AttributeError):  # one is closed, or missing
        alone = sys.stdout is None or not stat.S_ISFIFO(os.fstat(sys.stdout.fileno()).st_mode)
        return alone and stream is not None and stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    return False


def _erase() -> None:
    if _now.text and _replaces(sys.stderr):
        with contextlib.suppress(OSError):
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def _draw() -> None:
    if _now.text and _replaces(sys.stderr):
        width = shutil.get_terminal_size().columns
        with contextlib.suppress(OSError):
            sys.stderr.write(clean(_now.text).replace("\n", " ").replace("\t", " ")[: width - 1])
            sys.stderr.flush()


def called() -> str:
    """How this program was called: by its own name, or as a module."""
    name = os.path.basename(sys.argv[0])
    return name if name in COMMANDS else MODULE


def say(message: object) -> None:
    """Print a message for a person, who may not be looking any more; commands in it are named as this one was."""
    try:
        _print(sys.stderr, str(message).replace(f"{MODULE} ", f"{called()} "))
        _flush(sys.stderr)
    except OSError as error:
        _fail(2, error)


def out(line: object) -> None:
    """Print a line of data; raises Closed where stdout takes no more."""
    with _output():
        _print(sys.stdout, line)


def table(rows: Sequence[Sequence[str]]) -> None:
    """Print rows, each on one line, with their columns below each other; raises Closed."""
    cells = [[re.sub(r"[\n\t]", " ", clean(cell)) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells)]
    for row in cells:
        out("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())


def copy(text: str) -> None:
    """Print the content of a file: as it is, in UTF-8, unless stdout is a terminal; raises Closed."""
    if sys.stdout is None or sys.stdout.isatty():
        return out(text.removesuffix("\n"))
    with _output():
        sys.stdout.flush()
        sys.stdout.buffer.write(text.encode(errors="surrogateescape"))


def flush() -> None:
    """Write all data that was printed; raises Closed."""
    with _output():
        _flush(sys.stdout)


def stream(line: object) -> None:
    """Print a line of data at once; a job goes on, or ends as it did, whether it is read or not."""
    with contextlib.suppress(Closed):
        out(line)
        flush()


def finish() -> OSError | None:
    """Write all that was printed; return why some of it since the last call is lost."""
    phase("")
    with contextlib.suppress(Closed):
        flush()
    failure = _failures[0] if _failures else None
    _failures.clear()
    return failure


@contextlib.contextmanager
def _output() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        _fail(1, error)
        raise Closed from None


def _print(stream: TextIO | None, line: object) -> None:
    if stream is None:  # else `print` would take stdout for stderr
        return
    if not (_now.text and _replaces(stream)):
        stream.write(f"{clean(str(line))}\n")  # at once: another thread may print, too
        return
    with _lock:
        _erase()
        stream.write(f"{clean(str(line))}\n")
        stream.flush()
        _draw()


def _flush(stream: TextIO | None) -> None:
    if stream is not None:
        stream.flush()


def _fail(descriptor: int, error: OSError) -> None:
    """Note why output is lost, and let what follows go nowhere; else Python would fail when it ends."""
    if error.errno not in READER_LEFT:
        _failures.append(error)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)
