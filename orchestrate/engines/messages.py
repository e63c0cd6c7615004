"""The messages of nodes, which are untrusted: anything that does not have one of these forms is rejected.

The forms are described in `node/wait.py` and `node/files.py`.
"""

from __future__ import annotations

import json
from typing import Any

from orchestrate.forms import Check, Form, each, fits, number, numbered, one_of, seconds, sequence, text, truth

LONGEST = 16 << 20  # bytes of a message: the list of all files of a node is one
RANK, CODE, PID = number(1 << 20), number(255), number(1 << 31)
SIGN = one_of(("", "oom", "ending", "cut off"))
FACTS = sequence(number(1 << 63), 4)


def _generation(value: Any) -> bool:
    return type(value) is int and -1 <= value < 1 << 31


WORKER: Form = {"pid": PID, "state": text, "cpu": seconds}
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
    },
    "clean": {},
    "refused": {"error": text},
    "put": {"tags": each(text)},
    "news": {"logs": each(text), "files": each(FACTS), "links": each(text), "gone": sequence(text)},
    "read": {"data": text, "facts": FACTS},
}


def read(line: bytes) -> dict[str, Any]:
    """Parse the message in a line; raises ValueError if it is invalid."""
    try:
        message = json.loads(line)
    except RecursionError:
        raise ValueError("too deep") from None
    if not fits(message, {"say": one_of(FORMS)}):
        raise ValueError("no message")
    form: Form = {"error": text} if "error" in message else FORMS[message["say"]]
    if not fits(message, form):
        raise ValueError(f"no message of the form {message['say']}")
    return dict(message)
