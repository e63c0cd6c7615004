"""The errors with which a Python program ends, from the end of its output. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

RANK = r"(?:\[rank\d+\]: )?"  # torch's prefix of the lines of a traceback
NEAR_END = 12  # lines at the end in which an error must be to be the last one; libraries print more after it

_START = re.compile(rf"{RANK}Traceback \(most recent call last\):")
_FRAME = re.compile(rf'{RANK}\s+File "')
_LIBRARY = re.compile(
    r'File "(?:[^"]*/(?:site-packages|dist-packages|lib/python3\.\d+|orchestrate/node/programs)/|<frozen )'
)
_INDENTED = re.compile(rf"{RANK}\s+\S")
_NAMED = re.compile(rf"{RANK}[\w.]+(Error|Exception)\b")
_LINK = re.compile(
    rf"{RANK}(The above exception was the direct cause of|During handling of the above exception, another exception)"
)


def before_dump(lines: Sequence[str]) -> Sequence[str]:
    """Return the lines before Python's dump of all stacks, or all lines if there is none."""
    fatal = [i for i, line in enumerate(lines) if line.startswith("Fatal Python error: ")]
    return lines[: fatal[0] if fatal else None]


def final_errors(lines: Sequence[str]) -> list[str]:
    """Return the exceptions that ended a program: the last one with all lines after it, then those that led to it.

    Those are linked to it as in `raise … from …`, or were being handled. Without a traceback near the end, the only
    element is the last line that names an exception, or the last lines.
    """
    starts = [place for place, line in enumerate(lines) if _START.match(line)]
    first = _last_error(lines, starts)
    if first is None:
        rest = lines[-NEAR_END:]
        named = [place for place, line in enumerate(rest) if _NAMED.match(line)]
        return ["\n".join(rest[named[-1] :] if named else rest)]
    found = ["\n".join(lines[first:])]
    for start, following in zip(reversed(starts[:-1]), reversed(starts[1:])):
        links = [place for place in range(start, following) if _LINK.match(lines[place])]
        error = _error(lines[: links[-1]], start) if links else None
        if error is None:
            break
        found.append("\n".join(lines[error : links[-1]]).strip())
    return found


def excerpt(lines: Sequence[str], most: int) -> list[str]:
    """Return the last lines, from the start of a traceback that is longer, without frames of libraries but its last."""
    starts = [place for place, line in enumerate(lines) if _START.match(line)]
    error = _last_error(lines, starts)
    if not starts or error is None or starts[-1] >= len(lines) - most:
        return [*lines[-most:]]
    frames = [place for place in range(starts[-1], error) if _FRAME.match(lines[place])]
    found = [lines[starts[-1]]]
    for place, following in zip(frames, [*frames[1:], error]):
        if following == error or not _LIBRARY.search(lines[place]):
            found += lines[place:following]
        elif found[-1] != "  ...":
            found.append("  ...")
    found += lines[error:]
    return found if len(found) <= most else [found[0], *found[1 - most :]]


def ends_with_error(lines: Sequence[str]) -> bool:
    """Whether a traceback is the last that a program has printed, but for lines that libraries print after it."""
    starts = [place for place, line in enumerate(lines) if _START.match(line)]
    return bool(starts) and _last_error(lines, starts) is not None


def _last_error(lines: Sequence[str], starts: Sequence[int]) -> int | None:
    """The place of the exception of the last traceback, or after the last frame; None if it is not near the end."""
    first = _error(lines, starts[-1] if starts else 0)
    return first if first is not None and len(lines) - first <= NEAR_END else None


def _error(lines: Sequence[str], start: int) -> int | None:
    """The place of the exception after the last frame from `start` on; None if there is no frame."""
    frames = [place for place in range(start, len(lines)) if _FRAME.match(lines[place])]
    if not frames:
        return None
    place = frames[-1] + 1
    while place < len(lines) and _INDENTED.match(lines[place]):  # source lines
        place += 1
    return place
