"""What a node accepts: the fields of each message and their types. Anything else is refused with a reason.

A message is validated as a whole before the node acts on it: it may come from any process in the node's container, or
any container on its network.
"""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Callable, Mapping
from typing import Any

MOST_DIGITS = 18  # digits of a number, which is then below 2^63
KEY = re.compile(r"[0-9a-f]{64}")
WHOLE = re.compile(r"[0-9]{1,9}")  # a number in an environment variable
MOST = 10**9 - 1  # the largest of them
MOST_NODES, MOST_WORKERS = 10_000, 1024  # of a job, and of each of its nodes
Fields = Mapping[str, Callable[[Any], str]]  # field: returns what is wrong with its value, or an empty string


class Refused(ValueError):
    """An invalid message or environment variable; its text says what is wrong, and has no secret."""


def parsed(line: bytes) -> dict[str, Any]:
    """Parse the message in a line; raises Refused."""
    try:
        message = json.loads(line, parse_int=_digits)
    except Refused:
        raise
    except RecursionError:
        raise Refused("the message is nested too deeply") from None
    except ValueError:
        raise Refused("the message is not JSON") from None
    if not isinstance(message, dict):
        raise Refused("the message is not a JSON object")
    return message


def fields(what: str, message: Any, expected: Fields) -> dict[str, Any]:
    """The fields of a message, None for optional ones that are missing; raises Refused if one is invalid."""
    if not isinstance(message, dict):
        raise Refused(f"{what} must be an object")
    for name in message.keys() - expected.keys():
        raise Refused(f"{what}: unknown field {shown(name)}")
    for name, wrong in expected.items():
        if why := wrong(message.get(name)):
            raise Refused(f"{what}: {name}{why if name in message else ' is missing'}")
    return {name: message.get(name) for name in expected}


def request(message: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """A client's request to a waiting node, and its fields; raises Refused."""
    ask = message.get("ask")
    if not isinstance(ask, str):
        raise Refused("the message has no request in it")
    if ask not in REQUESTS:
        raise Refused(f"unknown request {shown(ask)}")
    return ask, fields(ask, {name: message[name] for name in message if name != "ask"}, REQUESTS[ask])


def integer(env: Mapping[str, str], name: str, default: int = 0, least: int = 0, most: int = MOST) -> int:
    """A whole number in an environment, `default` if it is unset or empty; raises Refused."""
    value = env.get(name) or str(default)
    if not WHOLE.fullmatch(value) or not least <= int(value) <= most:
        limits = f"of at least {least}" if most == MOST else f"from {least} to {most}"
        raise Refused(f"{name} must be a whole number {limits}, not {shown(value)}")
    return int(value)


def seconds(env: Mapping[str, str], name: str, default: float) -> float:
    """A number of seconds in an environment; otherwise like `integer`."""
    try:
        value = float(env.get(name) or default)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise Refused(f"{name} must be a number of seconds, not {shown(env[name])}")
    return value


def key(word: str) -> bytes:
    """The key of the job, from its hexadecimal digits; raises Refused."""
    if not KEY.fullmatch(word):
        raise Refused("NODE_KEY must be 64 hexadecimal digits")
    return bytes.fromhex(word)


def shown(text: str) -> str:
    """The beginning of an untrusted text, in quotes and without control characters."""
    return ascii(text[:60])


# --- checks of values: each returns what is wrong, or an empty string


def anything(value: Any) -> str:
    """Any value; it is checked elsewhere."""
    return ""


def text(value: Any) -> str:
    """Text that can be an argument, a path or the value of an environment variable."""
    if not isinstance(value, str):
        return " must be text"
    if "\0" in value:
        return " must not contain a NUL byte"
    try:
        os.fsencode(value)
    except UnicodeEncodeError:
        return " has text that cannot be encoded"
    return ""


def whole(value: Any) -> str:
    """A whole number of at least 0."""
    return "" if type(value) is int and value >= 0 else " must be a whole number of at least 0"


def _up_to(most: int) -> Callable[[Any], str]:
    """A whole number from 0 to `most`."""
    return lambda value: "" if not whole(value) and value <= most else f" must be a whole number from 0 to {most}"


def texts(value: Any) -> str:
    """A list of texts, which may be empty."""
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        return " must be a list of texts"
    return next(filter(None, map(text, value)), "")


def environment(value: Any) -> str:
    """The environment of a worker."""
    if not isinstance(value, dict):
        return " must be an object of names and values"
    for name, each in value.items():
        if not name or "=" in name or text(name):
            return f": {shown(name)} cannot be a name"
        if why := text(each):
            return f": {shown(name)}{why}"
    if "RANK" not in value:
        return ": RANK is missing"
    try:
        integer(value, "RANK"), integer(value, "TORCHELASTIC_RESTART_COUNT")
    except Refused as error:
        return f": {error}"
    return ""


def environments(value: Any) -> str:
    """A list of environments, one for each worker."""
    if not isinstance(value, list):
        return " must be a list of environments"
    return next(filter(None, map(environment, value)), "")


def _digits(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise Refused(f"a number has more than {MOST_DIGITS} digits")
    return int(digits)


def _flag(value: Any) -> str:
    return "" if isinstance(value, bool) else " must be true or false"


def _command(value: Any) -> str:
    return texts(value) or ("" if value else " must be a list of texts that is not empty")


def _lengths(value: Any) -> str:
    right = isinstance(value, dict) and not any(map(whole, value.values()))
    return "" if right else " must be an object of names and lengths"


def _address(value: Any) -> str:
    try:
        host, port = value
        socket.inet_pton(socket.AF_INET, host)
        right = isinstance(value, list) and type(port) is int and 0 < port < 1 << 16
    except (OSError, TypeError, ValueError):
        right = False
    return "" if right else " must be an IPv4 address and a port"


def _optional(wrong: Callable[[Any], str]) -> Callable[[Any], str]:
    return lambda value: "" if value is None else wrong(value)


REQUESTS: dict[str, Fields] = {  # what each does is in wait.py and files.py
    "start": {
        "command": _command,
        "env": environment,
        "inherit": _flag,
        "cwd": _optional(text),
        "log": _optional(whole),
        "filtered": _optional(_flag),
        "folders": _optional(_lengths),
    },
    "stop": {"kill": _flag},
    "dump": {},
    "freeze": {},
    "clean": {},
    "end": {},
    "status": {},
    "lease": {"relay": _address},
    "put": {"folder": text, "data": text, "offset": whole, "tag": text},
    "news": {"folder": text, "have": _lengths},
    "read": {"folder": text, "path": text, "offset": whole},
}
HELLO: Fields = {"name": text, "host": text, "cpus": _up_to(1 << 20), "gpus": texts}  # of a trainer, see join.py
END: Fields = {"rank": whole, "code": _up_to(255)}  # of one of its workers
