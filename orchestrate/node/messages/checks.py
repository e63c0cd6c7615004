"""Checks of untrusted values; each returns what is wrong with a value, or an empty string."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Collection, Mapping
from typing import Any

KEY_DIGITS = re.compile(r"[0-9a-f]{64}")
WHOLE_NUMBER = re.compile(r"[0-9]{1,9}")  # a number in an environment variable
MAX_NUMBER = 10**9 - 1  # the largest of them
MAX_NODES, MAX_WORKERS = 10_000, 1024  # of a job, and of each of its nodes
MAX_VALUES = 1_000_000  # of a file that is read whole
MAX_TEXT = 64 << 20  # bytes that its texts may take
VALUE = re.compile(rb'"[^"]*"|[,\[{]')
STATE = re.compile(r"[A-Za-z]?")  # as in proc(5), or unknown
Check = Callable[[Any], str]


def has_more_values(text: bytes, most: int) -> bool:
    """Whether JSON text has more texts, commas and opening brackets: parsed, it can take thirty times its size.

    Also for a text with null characters, which only UTF-16 and UTF-32 have, and Python would parse.
    """
    if b"\0" in text:
        return True
    if sum(map(text.count, (b",", b"[", b"{", b'"'))) <= most:  # fast, and almost always the case
        return False
    plain = text.replace(rb"\\", b"").replace(rb"\"", b"")  # without quotes in texts
    return any(count == most for count, _ in enumerate(VALUE.finditer(plain)))


def memory(text: bytes) -> int:
    """Return how many bytes the texts of JSON take at most: with one emoji, each character of a text takes four."""
    width = 4 if re.search(rb"\\u[dD]", text) else 2 if re.search(rb"\\u(?!00)", text) else 1
    return len(text) * (width if text.isascii() else 4)


def limit_values(text: bytes, most: int) -> None:
    """Raise ValueError for JSON text that has more values, or whose texts take more than 64 MiB."""
    if has_more_values(text, most):
        raise ValueError("it has too many values")
    if len(text) * 4 > MAX_TEXT and memory(text) > MAX_TEXT:
        raise ValueError("its text takes too much memory")


class Refused(ValueError):
    """An invalid message or environment variable; the text describes the error and contains no secret."""


def integer(env: Mapping[str, str], name: str, default: int = 0, least: int = 0, most: int = MAX_NUMBER) -> int:
    """A whole number in an environment, `default` if it is unset or empty; raises Refused."""
    value = env.get(name) or str(default)
    if not WHOLE_NUMBER.fullmatch(value) or not least <= int(value) <= most:
        limits = f"of at least {least}" if most == MAX_NUMBER else f"from {least} to {most}"
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


def key(digits: str) -> bytes:
    """The key of the job, from its hexadecimal digits; raises Refused."""
    if not KEY_DIGITS.fullmatch(digits):
        raise Refused("NODE_KEY must be 64 hexadecimal digits")
    return bytes.fromhex(digits)


def shown(text: str, most: int = 60) -> str:
    """The beginning of an untrusted text, in quotes and without control characters."""
    return ascii(text[:most])


# --- one value


def version(value: Any) -> str:
    """The version of a package (PEP 440), which may be unknown."""
    return "" if isinstance(value, str) and re.fullmatch(r"[\w.+!-]{0,40}", value, re.ASCII) else " must be a version"


def any_text(value: Any) -> str:
    """Any text, which is only displayed or decoded."""
    return "" if isinstance(value, str) else " must be text"


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


def path(value: Any) -> str:
    """The path of a file on another machine: in UTF-8, or as bytes that Python has read from a folder there."""
    try:
        right = isinstance(value, str) and b"\0" not in value.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        right = False
    return "" if right else " must be a path"


def flag(value: Any) -> str:
    """True or false."""
    return "" if isinstance(value, bool) else " must be true or false"


def whole(value: Any) -> str:
    """A whole number of at least 0."""
    return "" if type(value) is int and value >= 0 else " must be a whole number of at least 0"


def up_to(most: int) -> Check:
    """A whole number from 0 to `most`."""
    return lambda value: "" if not whole(value) and value <= most else f" must be a whole number from 0 to {most}"


def generation(value: Any) -> str:
    """The number of a generation, or -1 for none."""
    return "" if type(value) is int and -1 <= value < 1 << 31 else " must be the number of a generation"


def time(value: Any) -> str:
    """A time or a duration, in seconds."""
    right = type(value) in (int, float) and abs(value) < 1 << 53  # and so finite
    return "" if right else " must be a number of seconds"


def one_of(values: Collection[str]) -> Check:
    """One of some texts."""
    return lambda value: "" if isinstance(value, str) and value in values else f" must be one of {', '.join(values)}"


def address(value: Any) -> str:
    """An IPv4 address and a port."""
    try:
        host, port = value
        socket.inet_pton(socket.AF_INET, host)
        right = isinstance(value, list | tuple) and type(port) is int and 0 < port < 1 << 16
    except (OSError, TypeError, ValueError):
        right = False
    return "" if right else " must be an IPv4 address and a port"


def facts(value: Any) -> str:
    """Facts of a file; file systems may report times far from now."""
    right = (
        isinstance(value, list) and len(value) == 4 and all(type(one) is int and abs(one) < 1 << 96 for one in value)
    )
    return "" if right else " must be size, time of change, inode and mode"


def doing(value: Any) -> str:
    """The process of a worker: process id, state as in proc(5), CPU time, and memory, if its node reports it."""
    if not isinstance(value, dict) or not {"pid", "state", "cpu"} <= value.keys():
        return " must be the state of a process"
    right = isinstance(value["state"], str) and STATE.fullmatch(value["state"])
    state = "" if right else " must be a state of proc(5)"
    return up_to(1 << 31)(value["pid"]) or state or time(value["cpu"]) or up_to(1 << 62)(value.get("memory", 0))


# --- several values


def texts(value: Any) -> str:
    """A list of texts, which may be empty."""
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        return " must be a list of texts"
    return next(filter(None, map(text, value)), "")


def command(value: Any) -> str:
    """A list of texts that is not empty."""
    return texts(value) or ("" if value else " must be a list of texts that is not empty")


def lengths(value: Any) -> str:
    """An object of names and lengths."""
    right = isinstance(value, dict) and not any(map(whole, value.values()))
    return "" if right else " must be an object of names and lengths"


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


def list_of(check: Check) -> Check:
    """A list of values that pass a check."""
    return lambda value: next(filter(None, map(check, value)), "") if isinstance(value, list) else " must be a list"


def mapping(check: Check, of: Check = any_text) -> Check:
    """An object whose values pass one check, and whose names pass another."""

    def wrong(value: Any) -> str:
        if not isinstance(value, dict):
            return " must be an object"
        return next(filter(None, (of(name) or check(each) for name, each in value.items())), "")

    return wrong


def numeral(value: Any) -> str:
    """The decimal digits of a whole number, as the name of a value in an object."""
    return "" if isinstance(value, str) and value.isdecimal() and len(value) < 10 else " must have numbers as names"
