"""The messages of nodes, which are untrusted: anything that does not have one of these forms is rejected.

The forms are described in `node/wait.py` and `node/files.py`.
"""

from __future__ import annotations

import json
from typing import Any

from orchestrate.files.forms import (
    Check,
    Form,
    argument,
    each,
    fits,
    number,
    numbered,
    one_of,
    seconds,
    sequence,
    text,
    truth,
)

LONGEST = 16 << 20  # bytes of a message: the list of all files of a node is one
LONG, SHORT = (b'{"say": "news", ', b'{"say": "read", '), 1 << 20  # how long messages begin; bytes of any other one
RANK, CODE, PID = number(1 << 20), number(255), number(1 << 31)
SIGN = one_of(("", "oom", "ending", "cut off"))
MOST = 1 << 96  # of the facts of a file: file systems know times far from now


def _generation(value: Any) -> bool:
    return type(value) is int and -1 <= value < 1 << 31


def _facts(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 4 and all(type(one) is int and abs(one) < MOST for one in value)


def _paths(check: Check) -> Check:
    """A mapping of paths to such values."""
    return lambda value: each(check)(value) and all(map(argument, value))


WORKER: Form = {"pid": PID, "state": lambda value: text(value) and len(value) < 2, "cpu": seconds}  # as in proc(5)
RUNNING: Check = numbered(lambda value: fits(value, WORKER))
FORMS: dict[str, Form] = {
    "started": {"generation": _generation, "rank": RANK, "pid": PID},
    "ended": {"generation": _generation, "rank": RANK, "code": CODE, "at": seconds, "sign": SIGN, "asked": truth},
    "status": {
        "generation": _generation,
        "codes": numbered(CODE),
        "signs": numbered(SIGN),
        "running": RUNNING,
        "tags": each(text),
        "time": seconds,
        "importing": truth,
    },
    "clean": {},
    "refused": {"error": text},
    "put": {"tags": each(text)},
    "news": {"logs": each(text), "files": _paths(_facts), "links": _paths(argument), "gone": sequence(argument)},
    "read": {"data": text, "offset": number(1 << 63), "facts": _facts},
}


FAIL = ("put", "news", "read")  # answers that can be an error instead


def read(line: bytes) -> dict[str, Any]:
    """Parse the message in a line, and return what its form has; raises ValueError if it is invalid."""
    if len(line) > SHORT and not line.startswith(LONG):
        raise ValueError("too long")
    try:
        message = json.loads(line)
    except RecursionError:
        raise ValueError("too deep") from None
    if not fits(message, {"say": one_of(FORMS)}):
        raise ValueError("no message")
    failed = "error" in message and message["say"] in FAIL
    form: Form = {"error": text} if failed else FORMS[message["say"]]
    if not fits(message, form):
        raise ValueError(f"no message of the form {message['say']}")
    return {key: message[key] for key in ("say", *form)}


def reason(message: dict[str, Any]) -> str:
    """Why a node has not executed a request, shortened."""
    return " ".join(message["error"].split())[:200]
