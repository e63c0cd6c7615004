"""Values that may be None in general, but not in a test."""

from typing import TypeVar

T = TypeVar("T")


def not_none(value: T | None) -> T:
    """`value`, which must not be None."""
    assert value is not None
    return value
