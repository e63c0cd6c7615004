"""Curves of metrics: steps that were repeated, few points, and only what is worth drawing."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.page import Page, run

from orchestrate.pages import charts, curves
from orchestrate.pages.curves import BUCKETS, MAX_CURVES, MAX_NAME, progress, thinned
from orchestrate.pages.job import FEW, curves_of
from orchestrate.pages.page import drawn
from orchestrate.spec.spec import JobSpec


def test_repeated_steps_must_replace_those_before_the_restart():
    rows = [{"step": step, "loss": float(step)} for step in (1, 2, 3, 4)]
    rows += [{"step": step, "loss": 10.0 * step} for step in (3, 4, 5)]
    found = progress(rows, generations=2)
    assert found.curves == {"loss": [(1, 1), (2, 2), (3, 30), (4, 40), (5, 50)]}
    assert (found.done, found.repeated, found.restarts, found.latest) == (7, 2, 1, 3)


def test_a_metric_that_was_not_written_again_must_end_where_the_job_did():
    rows = [{"step": step, "loss": 1.0, "test": step / 2} for step in (5, 6, 7, 8)]
    found = progress([*rows, {"step": 7, "loss": 3.0}, {"step": 7, "accuracy": 0.5}], generations=2)
    assert found.drawn() == {"loss": [(5, 1), (6, 1), (7, 3)], "test": [(5, 2.5), (6, 3)]}
    assert (found.done, found.repeated, found.latest) == (5, 2, 1)  # the job began with a checkpoint of step 4


def test_steps_that_go_back_without_a_restart_must_leave_other_metrics_alone():
    rows = [{"step": 100 * epoch + step, "loss": 1.0} for epoch in (1, 2) for step in range(100)]
    rows[100:100] = [{"step": 1, "val_loss": 2.0}]
    found = progress([*rows, {"step": 2, "val_loss": 3.0}], generations=2)
    assert {name: len(curve) for name, curve in found.drawn().items()} == {"loss": 200, "val_loss": 2}
    assert (found.done, found.repeated, found.restarts) == (200, 0, 0)


@pytest.mark.parametrize("steps", [[1000, 900], [5, -100, -99], [1e14, 1], [3, 3, 2, 4]])
def test_no_more_steps_may_be_repeated_than_were_done(steps):
    found = progress([{"step": step, "loss": 1} for step in steps], generations=2)
    assert 0 <= found.repeated <= found.done


def test_steps_that_go_back_and_forth_must_take_no_more_time():
    """Several workers may write the same file; this takes minutes if each step back costs time for all steps."""
    rows = ({"step": step, "loss": 1.0} for number in range(100_000) for step in (number, number + 2))
    assert progress(rows, generations=1 << 31).restarts == 99_999


def test_rows_without_a_step_must_be_numbered():
    assert progress([{"loss": 3}, {"loss": 2}]).curves == {"loss": [(1, 3), (2, 2)]}


def test_a_curve_must_have_the_last_value_of_each_step_and_none_of_an_earlier_one():
    assert progress([{"step": step, "loss": loss} for loss, step in enumerate((1, 1, 5, 3))]).curves == {
        "loss": [(1, 1), (5, 2)]
    }


def test_only_numbers_may_become_curves():
    values = {"step": 1, "loss": 0.5, "ok": True, "nan": float("nan"), "huge": 1e300, "text": "a", "list": [1], "": 1}
    values |= {"total_steps": 9, "save_seconds": 1.5}
    assert progress([values]).curves == {"loss": [(1, 0.5)]}
    many = progress([{f"m{number}": value for number in range(100)} for value in (1, 2)])
    assert [*many.drawn().values()] == [[(1, 1), (2, 2)]] * MAX_CURVES


def test_settings_that_are_printed_once_must_not_take_the_place_of_metrics():
    rows = [*({f"setting {number}": 1} for number in range(50)), {"loss": 2}, {"loss": 1}]
    assert [*progress(rows).drawn()] == ["loss"]


def test_a_metric_with_many_values_must_keep_its_first_and_last_ones(monkeypatch):
    monkeypatch.setattr("orchestrate.pages.curves.MAX_VALUES", 10)
    for count in range(1, 100):
        curve = progress([{"step": step, "loss": 1.0} for step in range(count)]).curves["loss"]
        assert len(curve) <= 10 and (curve[0], curve[-1]) == ((0.0, 1.0), (count - 1.0, 1.0))


def test_a_metric_with_a_long_name_must_not_be_drawn():
    assert progress([{"x" * MAX_NAME: 1.0, "x" * (MAX_NAME + 1): 1.0}]).curves == {"x" * MAX_NAME: [(1, 1.0)]}


def test_curves_must_come_from_the_output_if_metrics_jsonl_has_few_points_and_from_its_first_part(paths, monkeypatch):
    def points(written: int) -> int:
        rows = "".join(f'{{"step": {step}, "loss": 1}}\n' for step in range(written))
        (paths.shared / "metrics.jsonl").write_text(rows)
        return len(curves_of(paths, JobSpec(), 1)[1]["loss"])

    paths.log(0).write_text("loss 0.5\n" * 50)
    assert (points(FEW - 1), points(FEW)) == (50, FEW)
    monkeypatch.setattr("orchestrate.pages.job.MAX_LOG", 20 * len("loss 0.5\n"))
    assert points(2) == 20


def test_loss_and_accuracy_must_come_first_and_other_constants_must_not_be_drawn():
    rows = [
        {"a": step, "val_acc": 1, "train_loss": 1, "width": 12, "zz": -step, "epoch": step, "seconds": step}
        for step in range(2)
    ]
    found = progress(rows)
    one = dataclasses.replace(run(found, 1.0), curves=found.drawn())
    assert [*drawn([one])] == ["train_loss", "val_acc", "a", "zz"]
    other = dataclasses.replace(one, name="other", curves={"width": [(0, 2.0), (1, 2.0)]})
    assert drawn([one, other])["width"] == {"job": [(1, 12), (2, 12)], "other": [(0, 2.0), (1, 2.0)]}


def test_curves_of_one_quantity_must_be_in_one_chart():
    names = ("train/loss", "eval_loss", "acc", "val_acc", "lr", "testing")
    found = progress({name: step + place for place, name in enumerate(names)} for step in range(2))
    one = dataclasses.replace(run(found, 1.0), curves=found.drawn())
    assert {title: [*curves] for title, curves in drawn([one]).items()} == {
        "loss": ["eval_loss", "train/loss"],
        "acc": ["acc", "val_acc"],
        "lr": ["lr"],
        "testing": ["testing"],
    }
    assert {*drawn([one, dataclasses.replace(one, name="other")])} == {*names}


def test_a_long_curve_must_keep_its_extremes():
    curve = [(float(step), float(step % 7)) for step in range(100_000)]
    assert len(progress({"loss": float(row)} for row in range(999)).drawn()["loss"]) <= 2 * BUCKETS
    curve[5000] = (5000.0, 99.0)
    curve[7000] = (7000.0, -99.0)
    short = thinned(curve)
    assert {(5000.0, 99.0), (7000.0, -99.0)} <= {*short} and short == sorted(short)
    assert (
        max(len(short), len(thinned(curve[: 3 * BUCKETS - 1]))) <= 2 * BUCKETS and thinned(curve[:100]) == curve[:100]
    )


VALUES = st.one_of(st.integers(), st.floats(), st.text(max_size=3), st.none(), st.booleans())
ROWS = st.lists(st.dictionaries(st.sampled_from(["step", "loss", "<a>", "\x00"]), VALUES, max_size=4), max_size=12)


@given(ROWS)
def test_any_metrics_must_give_a_chart(rows):
    curves = progress(json.loads(json.dumps(rows))).drawn()
    Page(charts.lines(curves)) if curves else None


def test_steps_that_are_too_large_to_be_told_apart_must_give_a_chart():
    assert charts.lines({"loss": [(9e18, -1.0), (9e18, 9.2e18)]})


def test_the_points_of_all_curves_together_must_be_limited(monkeypatch):
    monkeypatch.setattr(curves, "MAX_POINTS", 1000)
    found = progress({"step": step, **{f"loss{name}": step for name in range(50)}} for step in range(300))
    assert len(found.curves) == 50
    for curve in found.curves.values():
        assert 8 <= len(curve) <= 20 and curve[0][0] == 0 and curve[-1][0] == 299
