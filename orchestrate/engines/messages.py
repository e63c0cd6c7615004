"""What a node may say: other people's code may speak in its place, so anything of another form is no message.

The forms are described in `node/wait.py` and `node/files.py`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

LONGEST = 16 << 20  # bytes of a message: the list of all files of a node is one
SIGNS = ("", "oom", "ending", "cut off")
Check = Callable[[Any], bool]
Form = dict[str, Check]


def _number(most: float) -> Check:
    return lambda value: type(value) is int and 0 <= value <= most


def _time(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and abs(value) < 1 << 53


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _each(check: Check) -> Check:
    """A mapping of text to such values."""
    return lambda value: isinstance(value, dict) and all(map(check, value.values()))


def _list(check: Check, length: int | None = None) -> Check:
    return lambda value: isinstance(value, list) and len(value) == (length or len(value)) and all(map(check, value))


_rank, _code, _pid = _number(1 << 20), _number(255), _number(1 << 31)
_generation: Check = lambda value: value == -1 or _number(1 << 31)(value)  # noqa: E731
_sign: Check = lambda value: value in SIGNS  # noqa: E731
_facts = _list(_number(1 << 63), 4)
FORMS: dict[str, Form] = {
    "started": {"generation": _generation, "rank": _rank, "pid": _pid},
    "ended": {
        "generation": _generation,
        "rank": _rank,
        "code": _code,
        "at": _time,
        "sign": _sign,
        "asked": lambda value: isinstance(value, bool),
    },
    "status": {
        "generation": _generation,
        "codes": _each(_code),
        "signs": _each(_sign),
        "running": _each(lambda value: _fits(value, {"pid": _pid, "state": _text, "cpu": _time})),
        "tags": _each(_text),
        "time": _time,
    },
    "clean": {},
    "refused": {"error": _text},
    "put": {"tags": _each(_text)},
    "news": {"logs": _each(_text), "files": _each(_facts), "links": _each(_text), "gone": _list(_text)},
    "read": {"data": _text, "facts": _facts},
}


def read(line: bytes) -> dict[str, Any]:
    """The message of a line; raises ValueError where it is none."""
    try:
        message = json.loads(line)
    except RecursionError:
        raise ValueError("too deep") from None
    if not isinstance(message, dict) or message.get("say") not in FORMS:
        raise ValueError("no message")
    form: Form = {"error": _text} if "error" in message else FORMS[message["say"]]
    if not _fits(message, form):
        raise ValueError(f"no message of the form {message['say']}")
    return message


def _fits(value: Any, form: Form) -> bool:
    return isinstance(value, dict) and all(name in value and check(value[name]) for name, check in form.items())
