"""Complete messages of nodes: a test gives the fields that matter to it, the others have defaults."""

import json
from typing import Any

from orchestrate.node.messages import protocol

DEFAULTS: dict[str, dict[str, Any]] = {
    "started": {"generation": 0, "rank": 0, "pid": 7},
    "listening": {"generation": 0},
    "ended": {"generation": 0, "rank": 0, "code": 0, "at": 1.0, "hint": "", "stopping": False},
    "status": {"generation": 0, "codes": {}, "hints": {}, "running": {}, "tags": {}, "time": 1.0, "importing": False},
    "stack": {"generation": 0, "rank": 0, "text": "", "why": ""},
    "cleaned": {},
    "refused": {"error": "why"},
    "failed": {"error": "why"},
    "uploaded": {"tags": {}},
    "changes": {"logs": {}, "files": {}, "links": {}, "gone": []},
    "piece": {"data": "", "offset": 0, "facts": [0, 1, 1, 0o644]},
}


def fields(say: str, **facts: Any) -> dict[str, Any]:
    """A message of a node, as a JSON object."""
    result = {"say": say, **DEFAULTS[say], **facts}
    if say == "status":
        idle = {"pid": 7, "state": "S", "cpu": 1.0}
        result["running"] = {rank: idle | doing for rank, doing in result["running"].items()}
    return result


def message(say: str, **facts: Any) -> Any:
    """A message of a node, as an object of its class."""
    return protocol.REPORTS[say](**{name: value for name, value in fields(say, **facts).items() if name != "say"})


def encoded(say: str, **facts: Any) -> bytes:
    """A message of a node, as it arrives over a connection."""
    return json.dumps(fields(say, **facts)).encode() + b"\n"
