"""What the supervisor takes for progress, and for a sign of life, of all that a job writes."""

import os

import pytest

from orchestrate.paths import JobPaths
from orchestrate.traces import Traces


@pytest.fixture
def traces(tmp_path):
    for name in ("logs", "checkpoints"):
        (tmp_path / name).mkdir()
    return Traces(JobPaths(tmp_path))


@pytest.mark.parametrize(
    ("name", "counts"),
    [("checkpoints/step-1", True), ("checkpoints/.step-1.half", False), ("logs/rank-0.log", False), ("other", False)],
)
def test_only_a_whole_checkpoint_must_count_as_saved(traces, name, counts):
    before = traces.saved()
    (traces.paths.root / name).write_text("x")
    assert (traces.saved() != before) is counts


def test_a_checkpoint_that_is_saved_again_must_count(traces):
    path = traces.paths.checkpoints / "last"
    path.write_text("one")
    before = traces.saved()
    os.utime(path, ns=(0, 0))
    assert traces.saved() != before


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("logs/rank-0.log", True),
        ("metrics.jsonl", True),
        ("checkpoints/step-1", True),
        ("events.jsonl", False),
        ("supervisor.log", False),
    ],
)
def test_a_sign_of_life_must_be_the_workers_own(traces, name, counts):
    before = traces.activity()
    (traces.paths.root / name).write_text("x")
    assert (traces.activity() != before) is counts


def test_metrics_that_a_script_begins_anew_must_be_read_from_their_beginning(traces):
    traces.paths.metrics.write_text('{"step": 7, "loss": 0.5}\n')
    assert traces.step() == 7
    traces.paths.metrics.write_text('{"step": 8}\n')
    assert traces.step() == 8
