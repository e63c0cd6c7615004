"""Terminal output: data to stdout, messages to stderr, with terminal control characters removed."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import queue
import re
import shutil
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TextIO

COMMANDS, MODULE = ("orchestrate", "torch-orchestrate"), "python -m orchestrate"
READER_LEFT = (errno.EPIPE, errno.EIO)  # a closed pipe, a closed terminal
_ESCAPES = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # colors, cursor
    r"|\x1b\][^\x07\x1b\n]*(?:\x07|\x1b\\)?"  # window title, clipboard
    r"|\x1b[@-Z\\-_]?|[\x00-\x08\x0b-\x1f\x7f-\x9f]"
)
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # with which all of them begin: a fast search
_COLOR, RESET = re.compile(r"\x1b\[[0-9;:]*m"), "\x1b[0m"
_INVISIBLE = re.compile(  # Unicode categories Cf, Zl and Zp, except U+200D, which joins emoji
    "[\u00ad\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u180e\u200b\u200c\u200e\u200f\u2028-\u202e\u2060-\u206f"
    "\ufeff\ufff9-\ufffb\U000110bd\U000110cd\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a"
    "\U000e0001\U000e0020-\U000e007f]+"
)
ANNOUNCE_AFTER = 3.0  # seconds after which the current phase is printed as a line
PROGRESS_INTERVAL = 10.0  # seconds between two progress lines
_failures: list[OSError] = []  # errors that lost output, except READER_LEFT

_later: queue.SimpleQueue[str] = queue.SimpleQueue()  # safe in a signal handler, unlike printing


class _Status:
    """The current phase, as shown on the last line of a terminal."""

    text = ""
    timer: threading.Timer | None = None
    shown = float("-inf")  # when progress was last shown
    muted = False


_status, _lock = _Status(), threading.RLock()


class Picture(Protocol):
    """A picture of the job at the bottom of the terminal."""

    def above(self, line: str) -> None:
        """Print a line above it."""

    def phase(self, text: str) -> None:
        """Show what is in progress; an empty text ends the phase."""


_picture: Picture | None = None


class Closed(Exception):
    """Stdout is closed or full, so a command that only prints can exit."""


def clean(text: str, colors: bool = False) -> str:
    """Remove control characters except newline and tab, and invisible characters that change how text is displayed.

    `colors` keeps the sequences that set colors, and ends them at the end of the text.
    """
    if colors and "\x1b[" in text:
        text = _ESCAPES.sub(lambda found: found[0] if _COLOR.fullmatch(found[0]) else "", text) + RESET
    elif _CONTROL.search(text):
        text = _ESCAPES.sub("", text)
    return text if text.isascii() else _INVISIBLE.sub("", text)


def shortened(text: str, most: int) -> str:
    """The text, or its beginning with an ellipsis if it has more than `most` characters."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def quoted(value: object) -> str:
    """Format a value for an error message: on one line, and truncated if it is long."""
    return shortened(repr(value), 100)


def colors(stream: TextIO | None) -> bool:
    """Whether a stream shows colors: a terminal that can, unless `NO_COLOR` is set (no-color.org)."""
    return _terminal(stream) and not os.environ.get("NO_COLOR")


def _terminal(stream: TextIO | None) -> bool:
    """Whether a stream is a terminal that understands control sequences."""
    with contextlib.suppress(ValueError, OSError, AttributeError):  # a stream is closed or missing
        return stream is not None and stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    return False


def prepare() -> None:
    """Make printing safe: escape unencodable characters, and open closed standard streams on /dev/null.

    Call once, when the process starts.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:  # closed: the next file to be opened would get this descriptor
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def attach(picture: Picture | None) -> None:
    """Show a picture below everything that is printed on the terminal from now on; None ends that."""
    global _picture
    if picture:
        phase("")
    _picture = picture


def mute() -> None:
    """Show no phases until `finish`."""
    phase("")
    _status.muted = True


def phase(text: str) -> None:
    """Show what is in progress; an empty text ends the phase.

    A terminal shows it immediately, as a last line that is replaced. Otherwise, it is printed if it takes long.
    """
    if picture := _picture:
        return picture.phase(text)
    if _status.muted:
        return
    if not _lock.acquire(timeout=1):  # another thread is blocked in a write to a reader that does not read
        return
    try:
        if text == _status.text:
            return
        if _status.timer:
            _status.timer.cancel()
        _erase()
        _status.text, _status.timer = text, None
        _draw()
        if text and not replaces(sys.stderr):
            _status.timer = threading.Timer(ANNOUNCE_AFTER, _announce, [text])
            _status.timer.daemon = True
            _status.timer.start()
    finally:
        _lock.release()


@contextlib.contextmanager
def during(text: str) -> Iterator[None]:
    """Show a phase during a `with` block, or during a decorated function."""
    phase(text)
    try:
        yield
    finally:
        phase("")


def progress(text: str, show: Callable[[str], None]) -> None:
    """Show a worker's progress bar as the last line of a terminal; otherwise pass it to `show` at intervals."""
    if _picture:  # it has the bars of all workers
        return
    if replaces(sys.stderr):
        phase(text)
    elif text and time.monotonic() > _status.shown + PROGRESS_INTERVAL:
        _status.shown = time.monotonic()
        show(text)


def _announce(text: str) -> None:
    if text == _status.text:
        print_message(text)


def replaces(stream: TextIO | None) -> bool:
    """Whether the last line can be replaced: not if stdout goes to a pipe, whose reader may write to the terminal."""
    with contextlib.suppress(ValueError, OSError, AttributeError):  # a stream is closed or missing
        alone = sys.stdout is None or not stat.S_ISFIFO(os.fstat(sys.stdout.fileno()).st_mode)
        return alone and _terminal(stream)
    return False


def _erase() -> None:
    if _status.text and replaces(sys.stderr):
        with contextlib.suppress(OSError):
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def _draw() -> None:
    if _status.text and replaces(sys.stderr):
        width = shutil.get_terminal_size().columns
        with contextlib.suppress(OSError):
            sys.stderr.write(clean(_status.text).replace("\n", " ").replace("\t", " ")[: width - 1])
            sys.stderr.flush()


def called() -> str:
    """Return how this program was called: `orchestrate` or `python -m orchestrate`."""
    name = os.path.basename(sys.argv[0])
    return name if name in COMMANDS else MODULE


def print_message(message: object) -> None:
    """Print a message to stderr, with commands in it spelled as this one was called; never raises OSError."""
    try:
        _print(sys.stderr, str(message).replace(f"{MODULE} ", f"{called()} "))
        _flush(sys.stderr)
    except OSError as error:
        _discard(2, error)


def print_later(message: str) -> None:
    """Print a message to stderr from the thread of `print_queued`; can be called in a signal handler."""
    _later.put(message)


def print_queued() -> None:
    """Print the messages of `print_later`, forever: the target of a daemon thread."""
    while True:
        print_message(_later.get())


def out(line: object, colored: bool = False) -> None:
    """Print a line of data, on a terminal with its colors if it is `colored`; raises Closed if that fails."""
    with _output():
        _print(sys.stdout, line, colored and colors(sys.stdout))


def table(rows: Sequence[Sequence[str]], cut: bool = False) -> None:
    """Print rows with aligned columns, one line per row; raises Closed. On a terminal, `cut` them to its width."""
    most = shutil.get_terminal_size().columns if cut and sys.stdout and sys.stdout.isatty() else None
    cells = [[re.sub(r"[\n\t]", " ", clean(cell)) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells)]
    for row in cells:
        out("  ".join(cell.ljust(width) for cell, width in zip(row, widths))[:most].rstrip())


def copy(text: str) -> None:
    """Print the content of a file: unchanged, in UTF-8, unless stdout is a terminal; raises Closed."""
    if sys.stdout is None or sys.stdout.isatty():
        return out(text.removesuffix("\n"))
    with _output():
        sys.stdout.flush()
        sys.stdout.buffer.write(text.encode(errors="surrogateescape"))


def flush() -> None:
    """Flush stdout; raises Closed."""
    with _output():
        _flush(sys.stdout)


def stream(line: object, colored: bool = False) -> None:
    """Print a line of data and flush; ignores a closed stdout, which must not affect the job."""
    with contextlib.suppress(Closed):
        out(line, colored)
        flush()


def finish() -> OSError | None:
    """Flush all output; return the first error that lost output since the last call."""
    phase("")
    _status.muted = False
    with contextlib.suppress(queue.Empty):
        while True:
            print_message(_later.get_nowait())
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
        _discard(1, error)
        raise Closed from None


def _print(stream: TextIO | None, line: object, colored: bool = False) -> None:
    if stream is None:  # closed at start
        return
    text = clean(str(line), colored)
    if (picture := _picture) and stream.isatty():  # another thread may take the picture away
        return picture.above(text)
    if not (_status.text and replaces(stream)):
        stream.write(f"{text}\n")  # one write, since another thread may print
        return
    with _lock:
        _erase()
        stream.write(f"{text}\n")
        stream.flush()
        _draw()


def _flush(stream: TextIO | None) -> None:
    if stream is not None:
        stream.flush()


def _discard(descriptor: int, error: OSError) -> None:
    """Record why output is lost, and redirect the stream to /dev/null, or Python would fail at exit."""
    if error.errno not in READER_LEFT:
        _failures.append(error)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)
