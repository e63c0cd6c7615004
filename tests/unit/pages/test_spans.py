"""The time of a job must be divided by what it was spent on, and what happened must be listed."""

from typing import Any

import pytest
from support.page import run

from orchestrate.pages.curves import progress
from orchestrate.pages.page import duration
from orchestrate.pages.spans import Moment, moments, spans
from orchestrate.record.events import (
    CheckpointSaved,
    CodeCopied,
    DiskFull,
    EngineLost,
    Event,
    GenerationEnded,
    GenerationStarting,
    GpusUnused,
    HangFound,
    JobEnded,
    JobResumed,
    NodeInTrouble,
    NodesMissing,
    NodesStarting,
    NodesUp,
    OutcomeDecided,
    RestartDecided,
    WarningIssued,
    WorkersIsolated,
    WorkersLost,
    WorkersStarted,
)
from orchestrate.record.outcomes import Cause, Outcome
from orchestrate.spec.causes import Reason


def ended(outcome: Outcome, seconds: float, generation: int = 0) -> GenerationEnded:
    cause = Cause(rank=1, node="n", exit_code=1, cause=Reason.ERROR, summary="rank 1 failed", hint="")
    known = cause if outcome == Outcome.FAILED else None
    return GenerationEnded(generation=generation, outcome=outcome, why="finished", cause=known, seconds=seconds)


FIRST: list[Event] = [
    NodesStarting(2, "process"),
    GenerationStarting(0, (), 2, 1, seconds=1.0),
    WorkersStarted(seconds=3.0),
    ended(Outcome.FAILED, 10.0),
]
SECOND = [GenerationStarting(1, (), 2, 1, seconds=11.0), WorkersStarted(seconds=12.0)]


def summary(events: list[Event]) -> list[tuple[str, float, float, int, str]]:
    return [(span.kind, span.begin, span.end, span.generation, span.why) for span in spans(events)]


def test_the_time_of_a_job_must_be_divided_without_gaps():
    events = [*FIRST, RestartDecided(True, "", 0.0, seconds=10.0), *SECOND, ended(Outcome.SUCCEEDED, 20.0, 1)]
    events += [OutcomeDecided(Outcome.SUCCEEDED, "", seconds=20.0), JobEnded(Outcome.SUCCEEDED, "", seconds=22.0)]
    assert summary(events) == [
        ("starting", 0.0, 3.0, 0, ""),
        ("working", 3.0, 10.0, 0, "rank 1 failed"),
        ("restarting", 10.0, 12.0, 1, ""),
        ("working", 12.0, 20.0, 1, "finished"),
        ("ending", 20.0, 22.0, 1, ""),
    ]


def test_a_hang_must_begin_when_the_job_became_inactive():
    events = [*FIRST[:3], HangFound({}, after=4.0, seconds=9.0), ended(Outcome.FAILED, 10.0)]
    assert summary(events)[1:] == [("working", 3.0, 5.0, 0, ""), ("hanging", 5.0, 10.0, 0, "rank 1 failed")]
    events[3] = HangFound({}, after=60.0, seconds=9.0)
    assert summary(events)[1:] == [("hanging", 3.0, 10.0, 0, "rank 1 failed")]


def test_the_time_of_a_job_that_still_runs_must_be_divided_too():
    events = [*FIRST, *SECOND, NodeInTrouble("n", "paused", seconds=15.0)]
    assert summary(events)[-1] == ("working", 12.0, 15.0, 1, "")


def test_what_follows_a_last_failure_must_count_as_ending():
    events = [*FIRST, RestartDecided(False, "", 0.0, seconds=10.0), OutcomeDecided(Outcome.FAILED, "", seconds=11.0)]
    assert summary([*events, JobEnded(Outcome.FAILED, "", seconds=12.0)])[2:] == [("ending", 10.0, 12.0, 0, "")]


def test_a_generation_that_never_worked_must_prolong_the_start():
    events = [FIRST[0], FIRST[1], ended(Outcome.FAILED, 4.0), *SECOND, JobEnded(Outcome.STOPPED, "", seconds=13.0)]
    assert [(kind, begin, end) for kind, begin, end, *_ in summary(events)] == [
        ("starting", 0.0, 4.0),
        ("restarting", 4.0, 12.0),
        ("working", 12.0, 13.0),
    ]


def test_work_must_last_until_the_workers_have_ended_also_if_the_outcome_is_known_earlier():
    events = [*FIRST[:3], OutcomeDecided(Outcome.STOPPED, "", seconds=8.0), ended(Outcome.STOPPED, 10.0)]
    events += [NodeInTrouble("n", "paused", seconds=12.0)]
    assert summary(events)[1:] == [("working", 3.0, 10.0, 0, "finished"), ("ending", 10.0, 12.0, 0, "")]


def test_no_time_may_be_negative_if_the_clock_was_set_back():
    events = [*FIRST[:3], CheckpointSaved(seconds=9.0), NodeInTrouble("n", "paused", seconds=5.0)]
    assert summary(events)[1:] == [("working", 3.0, 9.0, 0, "")]
    assert summary([*FIRST[:3], ended(Outcome.FAILED, 2.0), *SECOND])[1:] == [("restarting", 3.0, 12.0, 1, "")]


def test_the_time_until_a_job_was_resumed_must_not_count_as_work():
    events = [*FIRST, OutcomeDecided(Outcome.FAILED, "", seconds=10.0), JobEnded(Outcome.FAILED, "", seconds=11.0)]
    events += [JobResumed(seconds=50.0), *(type(event)(**vars(event) | {"seconds": 60.0}) for event in SECOND)]
    assert [(kind, begin, end) for kind, begin, end, *_ in summary([*events, ended(Outcome.SUCCEEDED, 70.0, 1)])] == [
        ("starting", 0.0, 3.0),
        ("working", 3.0, 10.0),
        ("ending", 10.0, 11.0),
        ("stopped", 11.0, 50.0),
        ("starting", 50.0, 60.0),
        ("working", 60.0, 70.0),
    ]


def test_what_happened_must_be_listed_with_checkpoints_that_were_saved_one_after_the_other():
    events = [*FIRST[:3], CheckpointSaved(seconds=4.0), CheckpointSaved(seconds=6.0), NodeInTrouble("n", "paused")]
    events += [FIRST[3], RestartDecided(True, "restart 1 of 3", 0.0, seconds=10.5), *SECOND]
    events += [CheckpointSaved(seconds=13.0), JobEnded(Outcome.SUCCEEDED, "", seconds=22.0), JobResumed(seconds=50.0)]
    assert moments(events) == [
        Moment("checkpoint", (4.0, 6.0), "checkpoints saved"),
        Moment("trouble", (0.0,), "n is paused; the job waits (to resume: docker unpause)"),
        Moment("trouble", (10.0,), "generation 0 failed: rank 1 failed"),
        Moment("other", (10.5,), "restarting all workers (restart 1 of 3)"),
        Moment("checkpoint", (13.0,), "checkpoint saved"),
        Moment("other", (50.0,), "the job was resumed"),
    ]
    assert moments([*FIRST, CheckpointSaved(seconds=12.0)])[-1] == Moment("checkpoint", (12.0,), "checkpoint saved")


@pytest.mark.parametrize(
    "event",
    [
        *(NodesMissing(("n",), 1, "x"), HangFound({0: "S"}, 9.0), WorkersLost((1,)), WorkersIsolated(2, "x")),
        *(GpusUnused((1,)), EngineLost("x"), DiskFull("x"), WarningIssued("x\nmore")),
    ],
    ids=lambda event: type(event).__name__,
)
def test_trouble_must_be_marked_and_be_a_line(event):
    (found,) = moments([event, NodesUp(("n",), {"n": "h"}), CodeCopied(1, 2, 3, 4.0)])
    assert found.kind == "trouble" and "\n" not in found.text


def test_marks_must_be_on_the_bar_and_few():
    happened = [Moment("checkpoint", tuple(step / 1000 for step in range(100_000)), "")]
    happened += [Moment("trouble", (25.0, 1e9, -5.0), "x"), Moment("other", (50.0,), "y")]
    found = run(progress([]), 90.0, happened).marks
    assert len(found) == 1001 + 3 and all(0 <= percent <= 100 for percent, _, _ in found)
    assert [mark[:2] for mark in found if mark[2].kind != "checkpoint"] == [(25.0, 25.0), (100.0, 1e9), (0.0, -5.0)]


def test_time_for_checkpoints_and_for_the_slowest_worker_must_not_count_as_running():
    rows: list[dict[str, Any]] = [
        {"step": 1},
        {"step": 10, "rank_seconds": [0.5, 0.25, 0.0]},
        {"step": 10, "save_seconds": 3.0},
    ]
    rows += [{"step": 20, "rank_seconds": [0.0, 0.0, 1.5]}, {"step": 20, "save_seconds": 4.0}]
    found = run(progress(rows), 90.0)
    assert found.times == [
        ("running the script", pytest.approx(90.0 - 7.0 - 12.5)),
        ("saving checkpoints", 7.0),
        ("waiting for the slowest worker", pytest.approx(10 * 0.25 + 10 * 1.0)),
        ("starting nodes and workers", 10.0),
    ]
    assert found.goodput == pytest.approx(70.5 / 100) and found.not_counted == "saving and waiting"


def test_time_of_repeated_steps_must_not_count_as_saving_or_waiting_too():
    rows = [{"step": step, "save_seconds": 2.0, "rank_seconds": [1.0, 0.0]} for step in (1, 2, 1, 2)]
    assert run(progress(rows, generations=2), 90.0).times == [
        ("running the script", 40.0),
        ("saving checkpoints", 4.0),
        ("waiting for the slowest worker", 1.0),
        ("repeating 2 steps after restarts", 45.0),
        ("starting nodes and workers", 10.0),
    ]


@pytest.mark.parametrize("value", [1e9, -5.0, float("nan"), float("inf"), "1", True, None, [1e9]])
def test_no_more_time_may_be_lost_than_there_was(value):
    rows = [{"step": 1, "save_seconds": value, "rank_seconds": [value, 0.0]}, {"step": 2, "rank_seconds": value}]
    found = run(progress(rows), 90.0)
    assert sum(seconds for _, seconds in found.times) == pytest.approx(100.0)
    assert all(seconds > 0 for _, seconds in found.times) and 0 <= (found.goodput or 0) <= 1


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (99.9, "99.9 s"),
        (100, "1 min 40 s"),
        (119.6, "2 min 0 s"),
        (3600, "1 h 0 min"),
        (7261, "2 h 1 min"),
        (90_000, "1 d 1 h"),
    ],
)
def test_durations_on_pages_must_have_two_units_at_most(seconds, text):
    assert duration(seconds) == text
