"""Sizes in bytes, as a job file and people write them. Pure."""

from __future__ import annotations

UNLIMITED = "unlimited"  # a value of `memory`


UNITS = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def parse_size(text: str) -> int:
    """Convert a size such as `4g` to bytes."""
    return int(text.rstrip("bkmgBKMG")) * UNITS[text.lstrip("0123456789").lower()]


def format_bytes(count: int) -> str:
    """Format bytes as `5.2 GiB`, `512 MiB` or `40 KiB`."""
    shift, unit = next(((shift, unit) for shift, unit in ((30, "GiB"), (20, "MiB")) if count >> shift), (10, "KiB"))
    return f"{f'{count / (1 << shift):.1f}'.removesuffix('.0')} {unit}"
