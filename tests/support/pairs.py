"""Combinations of parameters, of which a few run always and all of them with --all."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest


def pairs(one: Sequence[Any], other: Sequence[Any]) -> list[Any]:
    """All combinations of two parameters; as many as contain each value once run without --all."""
    count = max(len(one), len(other))
    always = {(number % len(one), number % len(other)) for number in range(count)}
    return [
        pytest.param(first, second, marks=() if (i, j) in always else pytest.mark.exhaustive)
        for (i, first), (j, second) in itertools.product(enumerate(one), enumerate(other))
    ]
