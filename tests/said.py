"""What nodes say, whole: a test names what matters to it, the rest is as a node would say it."""

import json
from typing import Any

WHOLE: dict[str, dict[str, Any]] = {
    "started": {"generation": 0, "rank": 0, "pid": 7},
    "ended": {"generation": 0, "rank": 0, "code": 0, "at": 1.0, "sign": "", "asked": False},
    "status": {"generation": 0, "codes": {}, "signs": {}, "running": {}, "tags": {}, "time": 1.0, "importing": False},
    "clean": {},
    "refused": {"error": "why"},
    "put": {"tags": {}},
    "news": {"logs": {}, "files": {}, "links": {}, "gone": []},
    "read": {"data": "", "offset": 0, "facts": [0, 1, 1, 0o644]},
}


def said(say: str, **facts: Any) -> dict[str, Any]:
    """A message of a node."""
    message = {"say": say, **WHOLE[say], **facts}
    if say == "status":
        idle = {"pid": 7, "state": "S", "cpu": 1.0}
        message["running"] = {rank: idle | doing for rank, doing in message["running"].items()}
    return message


def sent(say: str, **facts: Any) -> bytes:
    """The same, as it comes over a connection."""
    return json.dumps(said(say, **facts)).encode() + b"\n"
