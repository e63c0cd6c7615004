"""The output of workers as `run` prints it: `[0] a line`, and `[0-2] a line` for what several ranks print."""

import re


def printed(text: str, rank: int) -> list[str]:
    """The lines of a rank."""
    found = re.findall(r"^\[ *([\d,-]+)\] (.*)$", text, re.M)
    return [line for ranks, line in found if rank in _expanded(ranks)]


def _expanded(ranks: str) -> set[int]:
    parts = [part.partition("-") for part in ranks.split(",")]
    return {rank for first, _, last in parts for rank in range(int(first), int(last or first) + 1)}
