"""Waiting for a condition."""

import time


def eventually(condition, timeout: float = 300):
    """Wait for the first true value of `condition()`; the timeout allows for a busy machine."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.05)
    raise AssertionError(f"not within {timeout} s: {condition}")
