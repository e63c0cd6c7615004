"""The memory that an action takes."""

import tracemalloc
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


def peak(action: Callable[[], Result]) -> tuple[Result, int]:
    """Return the result of an action, and the most bytes that Python took meanwhile, also in other threads."""
    tracemalloc.start()
    try:
        return action(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
