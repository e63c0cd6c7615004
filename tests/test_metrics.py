"""Metrics must be kept as far as a report needs them, whatever the job writes."""

import json

import pytest

from orchestrate.job import metrics


def kept(*lines: object) -> list[dict]:
    """The metrics kept of lines, each given as data or as raw bytes."""
    return metrics.fold(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines)


def test_the_last_value_of_each_metric_and_every_pace_record_must_be_kept():
    lines = ({"step": 1, "loss": 0.5, "rank_seconds": [1, 2]}, {"step": 2, "rank_seconds": [3, 4]}, {"step": 3})
    assert kept(*lines) == [{"rank_seconds": [1, 2]}, {"rank_seconds": [3, 4]}, {"step": 3, "loss": 0.5}]
    assert kept() == []


@pytest.mark.parametrize(
    "line", [b"", b"[8]", b"nonsense", b'{"step": 1', b"\xff", b"[" * 20_000, b'{"a": ' + b"9" * 5000]
)
def test_a_line_that_is_not_an_object_must_be_ignored(line):
    assert kept({"step": 1}, line) == [{"step": 1}]


def test_a_line_that_is_too_long_must_be_ignored():
    room = metrics.MAX_LINE - len('{"a": ""}')
    lines = [b'{"step": 1, "a": "' + b"x" * room + b'"}', b" " * room + b'{"step": 2}']
    assert kept(*lines) == []
    assert kept(b'{"step": 3}'.ljust(metrics.MAX_LINE)) == [{"step": 3}]


@pytest.mark.parametrize(
    "value",
    [
        [{}] * 1001,
        [[0] * 500] * 2,  # more than 1000 values, counting the lists
        {str(number): [0] for number in range(501)},
        [[[[0]]]],
        "x" * 1001,
        1 << 63,
    ],
)
def test_a_value_that_is_too_large_must_be_dropped(value):
    assert kept({"a": value, "b": 1}) == [{"b": 1}]


def test_a_loss_of_nan_must_be_kept():
    assert str(kept({"loss": float("nan")})) == "[{'loss': nan}]"


@pytest.mark.parametrize("value", [[0.5] * 1000, {"a": {"b": [1, None, True]}}, "x" * 1000, [[[0]]]])
def test_a_value_of_the_maximum_size_must_be_kept(value):
    assert kept({"a": value}) == [{"a": value}]


def test_only_the_last_metrics_and_pace_records_that_fit_must_be_kept(monkeypatch):
    monkeypatch.setattr(metrics, "NAMES", 3)
    monkeypatch.setattr(metrics, "ROOM", 9)
    last = {f"name-{number}": number for number in range(5, 9)}  # one more than a report shows
    assert kept(*({f"name-{number}": number} for number in range(9))) == [last]
    assert kept(*({"rank_seconds": [number, 0]} for number in range(9))) == [
        {"rank_seconds": [number, 0]} for number in (6, 7, 8)
    ]
    assert kept({"x" * 1001: 1}) == []
