"""Forms that data must have before it is used: what each value may be, as functions that say so. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from orchestrate.node import checks

Check = Callable[[Any], bool]
Form = dict[str, Check]


def number(most: float) -> Check:
    """A whole number from 0."""
    return lambda value: type(value) is int and 0 <= value <= most


def seconds(value: Any) -> bool:
    """A time, or a span of it."""
    return not checks.time(value)


def text(value: Any) -> bool:
    """Text."""
    return isinstance(value, str)


def argument(value: Any) -> bool:
    """Text that a process can be given: in UTF-8, or as bytes that Python has read from a path or command line."""
    return not checks.path(value)


def truth(value: Any) -> bool:
    """True or false."""
    return not checks.flag(value)


def one_of(values: Collection[Any]) -> Check:
    """One of these."""
    return lambda value: isinstance(value, str) and value in values


def each(check: Check) -> Check:
    """A mapping of text to such values."""
    return lambda value: isinstance(value, dict) and all(map(check, value.values()))


def numbered(check: Check) -> Check:
    """A mapping of whole numbers, as text, to such values."""
    return lambda value: each(check)(value) and not any(map(checks.numeral, value))


def sequence(check: Check, length: int | None = None) -> Check:
    """A list of such values."""
    return lambda value: isinstance(value, list) and length in (None, len(value)) and all(map(check, value))


def fits(value: Any, form: Form) -> bool:
    """Whether a mapping has all values of a form; it may have others."""
    return isinstance(value, dict) and all(name in value and check(value[name]) for name, check in form.items())
