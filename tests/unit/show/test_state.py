"""The state of a job as it is shown: what its workers do, how fast they are, and when the job will have ended."""

import math

import pytest
from support.plans import HERE, plan
from support.said import said

from orchestrate.record import events
from orchestrate.record.outcomes import Activity, Outcome
from orchestrate.show.state import MAX_NAMES, View, clock, status, worst_first
from orchestrate.spec.spec import JobSpec

BAR = " 50%|#####     | 135/270 [00:04<01:02,  2.00s/it]"


@pytest.fixture
def view():
    """A job of three workers that have started at second 3."""
    found = View(plan(JobSpec(trainers=2), HERE, "a-1"), 0.0)
    found.event(events.WorkersStarted(), 3.0)
    return found


def states(view: View) -> list[str]:
    return [rank.state for rank in view.ranks.values()]


def test_workers_must_be_shown_as_stopping_until_they_end(view):
    view.event(events.WorkerEnded(1, "trainer-1", 0, False), 4.0)
    view.event(events.WorkerEnded(7, "trainer-7", 1, False), 4.0)  # there is none
    view.event(events.WorkersStopping("max_run", kill=False), 5.0)
    assert states(view) == ["stopping", "succeeded", "stopping"]
    view.event(events.WorkerEnded(2, "trainer-2", 1, False), 6.0)
    assert states(view) == ["stopping", "succeeded", "failed"]
    view.event(events.WorkerEnded(0, "master", 143, True), 6.0)
    assert states(view) == ["stopped", "succeeded", "failed"]
    view.event(events.WorkersStopping("kill", kill=True), 7.0)
    assert states(view) == ["stopped", "succeeded", "failed"]


def test_a_pace_must_count_neither_lines_that_are_read_together_nor_steps_that_go_back(view):
    for number, step in enumerate(range(1, 6)):
        view.hear(0, said(f"step {step}"), 10.0 + number / 1000)
    for step, now in ((10, 20.0), (2, 20.001), (3, 22.001), (1, 30.0), (6, 40.0)):
        view.hear(0, said(f"step {step}"), now)
    assert [*view.ranks[0].paces] == pytest.approx([2.0, 2.0, 2.0])
    assert view.ranks[1].idle(40.0) == 0.0  # steps count as work of all, also after they have gone back


def test_a_line_must_change_only_what_it_reports_and_a_step_without_a_total_must_end_the_old_one(view):
    view.hear(0, said(BAR), 4.0)
    view.hear(0, said("loss 0.5"), 5.0)
    assert status(view, 0.0) == "step 135 of 270 (50%), 1:02 left, loss 0.5"
    view.hear(0, said("step 9, lr 0.1"), 6.0)
    assert status(view, 0.0) == "step 9, loss 0.5, lr 0.1" and view.ranks[0].progress.step_seconds == 2.0
    view.hear(0, said("step 0/90"), 7.0)
    assert status(view, 0.0).startswith("step 0 of 90 (0%), ")


def test_of_a_bar_that_starts_again_nothing_must_be_concluded_for_the_job(view):
    bar = "|  | {} [00:01<00:02, 1.00it/s, loss={}]"
    for step, shown in (("4/10", "step 4 of 10 (40%), 2 s left"), ("2/3", "step 2 of 3 (67%), 2 s left")):
        view.hear(0, said(bar.format(step, 0.5)), 4.0)
        assert status(view, 0.0) == f"{shown}, loss 0.5"  # the second is that of an evaluation
    view.hear(0, said(bar.format("3/10", 0.25)), 5.0)
    assert status(view, 0.0) == "step 3 of 10 (30%), 2 s left in this epoch, loss 0.25"
    view.hear(0, said("Epoch 1: " + bar.format("1/7", 0.25)), 6.0)
    assert status(view, 0.0) == "step 1 of 7 (14%), 2 s left in this epoch, loss 0.25"
    view.measure({"step": 21, "total_steps": 90}, 7.0)
    view.hear(0, said(bar.format("4/10", 0.125)), 8.0)
    assert status(view, 0.0) == "step 21 of 90 (23%), 36 s left, loss 0.125"


def test_the_time_left_must_follow_from_the_pace_unless_the_script_reports_it(view):
    for step in (10, 20):
        view.measure({"step": step, "total_steps": 50}, float(step))
    assert status(view, 0.0) == "step 20 of 50 (40%), 30 s left"
    view.measure({"step": 30}, 40.0)
    assert status(view, 0.0) == "step 30 of 50 (60%), 30 s left"
    view.hear(0, said("| 30/50 [00:04<00:00,  2.00s/it]"), 50.0)
    assert status(view, 0.0) == "step 30 of 50 (60%), 0 s left"


def test_goodput_must_count_from_when_events_happened_since_the_job_was_resumed(view):
    view.event(events.JobResumed(), 100.0, age=10.0)
    view.event(events.WorkersStarted(), 100.0, age=5.0)
    assert view.goodput(100.0) == 5 / 10
    ended = events.GenerationEnded(generation=0, outcome=Outcome.FAILED, why="")
    view.event(ended, 110.0, age=2.0)
    assert view.goodput(120.0) == 13 / 30


def test_a_phase_must_last_as_long_as_it_is_reported_and_an_event_be_one_line(view):
    view.enter("starting", 4.0)
    view.enter("starting", 9.0)
    view.event(events.WarningIssued("first\nsecond", seconds=7.0), 9.0)
    assert view.phase_began == 4.0 and [*view.events] == [(7.0, "warning: first")]


def test_what_a_worker_uses_must_be_that_since_the_last_sample(view):
    samples = [(10.0, 1.0, 9), (10.0, 1.0, 9), (12.0, 3.0, 5), (14.0, 0.5, 7), (16.0, 0.6, 7)]
    found = []
    for now, cpu, memory in samples:
        view.activity({1: Activity("R", cpu, memory), 7: Activity("R", cpu)}, now)
        found.append((view.ranks[1].cores, view.ranks[1].memory, view.ranks[1].idle(now)))
    assert found == [(0, 9, 7), (0, 9, 7), (1.0, 5, 0), (0.0, 7, 2), (pytest.approx(0.05), 7, 4)]


def test_metrics_in_metrics_jsonl_must_be_preferred_for_rank_0_only(view):
    view.measure({"step": 7, "loss": 0.5, "ok": True}, 4.0)
    view.measure({"step": 8, "acc": 0.25}, 5.0)
    for rank in (0, 1):
        view.hear(rank, said("step 9 loss 2.5, lr 0.1"), 6.0)
    assert [view.ranks[rank].progress.metrics for rank in (0, 1)] == [
        {"loss": 0.5, "acc": 0.25, "lr": 0.1},
        {"loss": 2.5, "lr": 0.1},
    ]


def test_the_progress_of_a_job_must_be_that_of_the_first_worker_that_still_runs(view):
    view.hear(0, said("loss 0.5"), 4.0)
    assert status(view, 0.0) == "loss 0.5"  # of rank 0, whichever leads
    for rank in (1, 2):
        view.hear(rank, said(f"step {rank - 1}"), 4.0)
    assert status(view, 0.0) == "step 0, loss 0.5"
    view.event(events.WorkerEnded(1, "trainer-1", 0, False), 5.0)
    assert status(view, 0.0) == "step 1, loss 0.5"
    view.event(events.WorkerEnded(2, "trainer-2", 0, False), 5.0)
    assert status(view, 0.0) == "step 0, loss 0.5"


def test_workers_that_failed_must_come_first_then_those_that_others_wait_for_then_those_behind():
    view = View(plan(JobSpec(trainers=6), HERE, "a-1"), 0.0)
    view.event(events.WorkersStarted(), 3.0)
    for rank, step in ((1, 9), (2, 8), (3, 9), (4, 0)):
        view.ranks[rank].hear(said(f"step {step}"), 20.0)
    view.ranks[6].hear([], 20.0)
    view.event(events.WorkerEnded(3, "trainer-3", 1, False), 21.0)
    assert [rank.number for rank in worst_first(view.ranks, 22.0)] == [3, 4, 2, 1, 6, 0, 5]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (59.9, "59 s"),
        (60, "1:00"),
        (125, "2:05"),
        (3725, "1:02:05"),
        (-1, "0 s"),
        (math.inf, "277777:46:40"),
    ],
)
def test_durations_must_be_short(seconds, text):
    assert clock(seconds) == text


def test_only_the_last_metrics_must_be_kept_of_names_without_end(view):
    for number in range(500):
        view.measure({"step": number, f"a{number}": 1.0}, 4.0)
        view.hear(1, said(f"{{'b{number}': 1.0}}"), 4.0)
    view.measure({f"c{number}": 1.0 for number in range(500)}, 5.0)
    for rank, last in zip(view.ranks.values(), ("c499", "b499")):
        assert len(rank.progress.metrics) <= MAX_NAMES and last in rank.progress.metrics
    assert len(view.measured) <= MAX_NAMES


def test_events_must_be_shown_without_control_characters(view):
    """As a refusal of a node in a hostile image may have them."""
    view.event(events.WarningIssued("master: a\x1b]0;title\x07\x1b[2Kb\u202e"), 4.0)
    assert view.events[-1][1].endswith("master: ab")


def test_no_time_must_be_left_of_a_job_that_does_nothing(view):
    view.measure({"step": 10, "total_steps": 50}, 10.0)
    view.measure({"step": 20, "total_steps": 50}, 20.0)
    assert status(view, 24.0).endswith("30 s left") and status(view, 25.0) == "step 20 of 50 (40%)"


def test_the_time_of_a_hang_must_not_count_as_goodput(view):
    view.event(events.HangFound({}, after=10.0), 20.0, age=1.0)
    view.event(events.GenerationEnded(generation=0, outcome=Outcome.FAILED, why=""), 24.0)
    assert view.work.seconds(30.0) == 6.0
    view.event(events.WorkersStarted(), 30.0)
    view.event(events.HangFound({}, after=90.0), 35.0)
    assert view.work.seconds(40.0) == 6.0


def test_epochs_must_count_as_progress_until_there_are_steps(view):
    view.hear(0, said("Epoch 1/50, loss 0.5"), 10.0)
    view.hear(0, said("Epoch 2/50, loss 0.25"), 12.0)
    assert status(view, 0.0) == "epoch 2 of 50 (4%), 1:36 left, loss 0.25"
    view.measure({"step": 10, "total_steps": 20}, 13.0)
    view.hear(0, said("Epoch 3/50"), 14.0)
    assert status(view, 0.0).startswith("step 10 of 20 (50%), loss 0.25") and not view.ranks[0].paces
