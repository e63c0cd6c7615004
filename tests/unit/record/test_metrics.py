"""Metrics must be kept as far as a report needs them, whatever the job writes."""

import json
import math
from typing import Any

import pytest

from orchestrate.record import metrics
from orchestrate.record.metrics import is_number, listed, place, shown, strict
from orchestrate.record.steps import Steps


def kept(*lines: object) -> list[dict]:
    """The metrics kept of lines, each given as data or as raw bytes."""
    return metrics.fold(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines)


def test_the_last_value_of_each_metric_and_every_pace_record_must_be_kept():
    lines = ({"step": 1, "loss": 0.5, "rank_seconds": [1, 2]}, {"step": 2, "rank_seconds": [3, 4]}, {"step": 3})
    assert kept(*lines) == [{"rank_seconds": [1, 2]}, {"rank_seconds": [3, 4]}, {"step": 3, "loss": 0.5}]
    assert kept() == [] and kept({"rank_seconds": 0.5}) == [{"rank_seconds": 0.5}]


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
        {"x" * 1001: 0},
        [[[[0]]]],
        "x" * 1001,
        1 << 63,
    ],
)
def test_a_value_that_is_too_large_must_be_dropped(value):
    assert kept({"a": value, "b": 1}) == [{"b": 1}]


def test_a_loss_of_nan_must_be_kept():
    assert str(kept({"loss": float("nan")})) == "[{'loss': nan}]"


@pytest.mark.parametrize("value", [[1 / 3] * 1000, {"a": {"b": [1, None, True]}}, "x" * 1000, [[[0]]]])
def test_a_value_of_the_maximum_size_must_be_kept(value):
    assert kept({"a": value}) == [{"a": value}]


def test_only_the_last_metrics_and_pace_records_that_fit_must_be_kept(monkeypatch):
    monkeypatch.setattr(metrics, "NAMES", 3)
    monkeypatch.setattr(metrics, "ROOM", 9)
    last = {f"name-{number}": number for number in range(5, 9)}  # one more than a report shows
    assert kept(*({f"name-{number}": number} for number in range(9))) == [last]
    assert kept({f"name-{number}": number for number in range(9)}) == [last]
    empty, long = {"rank_seconds": []}, {"rank_seconds": [1, 2, 3]}
    assert kept(*[empty] * 9, long) == [*[empty] * 5, long]  # each takes the room of one number more than it has
    assert kept(*({"rank_seconds": [number, 0]} for number in range(9))) == [
        {"rank_seconds": [number, 0]} for number in (6, 7, 8)
    ]
    assert kept({"x" * 1001: 1}) == []


def test_metrics_that_a_copied_report_contains_must_be_shown_as_far_as_they_are_metrics():
    deep: Any = 1
    for _ in range(5000):
        deep = [deep]
    found = {"loss": math.nan, "grad": -math.inf, "big": 10**400, "deep": deep, "rank_seconds": [1], "note": "x"}
    found |= {"save_seconds": 1, "total_steps": 9}
    more = found | {"x" * 2000: 1, "acc": 0.123456, "on": True}
    assert listed(shown(more)) == ["loss NaN", "acc 0.1235", "grad -Infinity"]
    assert strict(shown(found)) == {"loss": "NaN", "grad": "-Infinity", "note": "x"}
    assert shown(None) == shown([1]) == {}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1 << 63, -1e300, True, "1", None])
def test_only_finite_numbers_of_a_reasonable_size_must_count_as_numbers(value):
    assert is_number(0) and is_number(-2.5) and not is_number(value)


@pytest.mark.parametrize(
    ("name", "importance"),
    [
        ("loss", 0),
        ("Loss", 0),
        ("train_loss", 0),
        ("eval/loss", 0),
        ("test_accuracy", 1),
        ("acc1", 1),
        ("gloss", 2),
        ("replaced", 2),
    ],
)
def test_losses_and_accuracies_must_be_the_most_important_metrics(name, importance):
    assert place(name) == importance


def test_time_that_steps_took_again_must_not_be_lost_twice():
    found = Steps(generations=2)
    for _ in range(2):
        for step in range(1, 101):
            found.record({"step": step, "rank_seconds": [0.8, 0.0]})
    assert (found.done, found.repeated, found.latest) == (200, 100, 100)
    assert found.divided(200.0) == pytest.approx({"steps": 60.0, "saving": 0.0, "waiting": 40.0, "repeated": 100.0})


def test_lines_without_a_step_must_not_count_as_steps_if_others_have_one():
    found = Steps()
    for step in range(1, 11):
        found.record({"step": step})
        found.record({"loss": 0.5})
    assert found.done == 10


@pytest.mark.parametrize(("generations", "late"), [(1, 11), (2, 3)])
def test_a_line_of_another_writer_must_not_count_as_a_restart(generations, late):
    found = Steps(generations)
    for step in (10, 11, 12, late, 13):  # only a restarted job goes back, and not beyond its first step
        found.record({"step": step})
    assert (found.done, found.repeated) == (4, 0)


def test_no_more_steps_may_be_repeated_than_there_were_if_they_are_fractions():
    found = Steps(generations=2)
    for _ in range(2):
        for step in range(1, 100):
            found.record({"step": step / 10})
    assert found.divided(200.0)["repeated"] == 200.0


def test_seconds_of_ranks_that_are_no_numbers_must_not_be_kept():
    """Each could be a list of a thousand values."""
    rows = [[1.5, 2], [[1], 2], [{}, "x"]]
    assert kept(*({"rank_seconds": row} for row in rows)) == [{"rank_seconds": [1.5, 2]}]
