"""Values that a node takes from its environment."""

import pytest

from orchestrate.node.messages import checks


@pytest.mark.parametrize(
    ("env", "expected"), [({}, 30.0), ({"A": ""}, 30.0), ({"A": "0"}, 0.0), ({"A": "1.5"}, 1.5)], ids=str
)
def test_seconds_must_be_the_default_only_if_they_are_not_given(env, expected):
    assert checks.seconds(env, "A", 30.0) == expected
