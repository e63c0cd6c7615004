"""What a screen keeps of a job: when its events happened, which workers it has, and what its script has written."""

import re

import pytest
from support.optional import not_none
from support.plans import HERE, plan
from support.said import said
from support.scripted import Clock

from orchestrate.record import events, run_dir
from orchestrate.record.outcomes import Activity
from orchestrate.record.progress import parse
from orchestrate.show.state import status
from orchestrate.show.tracking import PlainScreen, TrackingScreen
from orchestrate.spec.spec import JobSpec

BAR = " 50%|#####     | 135/270 [00:04<01:02,  2.00s/it, loss=0.25]"


def hide(text: str) -> str:
    return text.replace("hunter2", "***")


@pytest.fixture
def now():
    return Clock()


@pytest.fixture
def screen(paths, now):
    return TrackingScreen(run_dir.load_for_display(paths)[1], paths, hide, now)


def test_events_must_count_from_when_they_happened(screen, now):
    screen.began(100.0)
    screen.event(events.WorkersStarted(time=now.time() - 60))
    assert (now.monotonic() - screen.view.began, screen.view.goodput(now.monotonic())) == (100, 0.6)
    for seconds, age in ((now.time() - 30, 30), (now.time() + 30, 0), (0.0, 0)):  # later: the clock was set back
        screen.event(events.CheckpointSaved(time=seconds))
        assert now.monotonic() - not_none(screen.view.saved) == age


def test_only_workers_of_the_generation_that_runs_may_be_shown(screen, now):
    screen.planned(plan(JobSpec(trainers=0), HERE, "a-1", generation=1))
    screen.heard(2, said(BAR))
    screen.heard(0, [])
    assert screen.view.ranks[0].heard == now.monotonic()
    screen.activity({0: Activity("R", 1.0, 7), 2: Activity("R", 1.0, 7)})
    assert {number: rank.memory for number, rank in screen.view.ranks.items()} == {0: 7} and not status(
        screen.view, 0.0
    )


def test_metrics_in_several_lines_must_be_shown_together_without_secrets_in_their_names(screen, paths):
    rows = '{"step": 5, "loss": 0.5}\n{"step": 5, "acc": 0.25, "hunter2": 1}\n{"step": 9, "total_steps": 20}\n'
    (paths.shared / "metrics.jsonl").write_text(rows)
    screen.catch_up({})
    assert status(screen.view, 0.0) == "step 9 of 20 (45%), loss 0.5, acc 0.25" and screen.view.work.steps.done == 5


@pytest.mark.parametrize(("rows", "bars"), [('{"loss": 1}\n', {}), ("", {0: parse(BAR)})])
def test_a_phase_must_end_once_the_script_reports_progress(screen, paths, now, rows, bars):
    screen.view.enter("starting 3 nodes", now.monotonic())
    screen.catch_up({})
    assert screen.view.phase == "starting 3 nodes"
    (paths.shared / "metrics.jsonl").write_text(rows)
    screen.catch_up(bars)
    assert screen.view.phase == ""


def test_metrics_must_be_read_from_time_to_time_and_an_empty_status_must_not_be_printed(paths, now, capsys):
    screen, reads = PlainScreen(run_dir.load_for_display(paths)[1], paths, hide, now), []
    (paths.shared / "metrics.jsonl").write_text('{"hunter2": 1}\n')
    for _ in range(40):
        now.sleep(0.5)
        screen.refresh(lambda: reads.append(now.now) or {0: parse(BAR)})
    assert len(reads) == 5 and re.fullmatch("a-1: step 135 of 270 .*, loss 0.25\n", capsys.readouterr().err)
    screen.planned(plan(JobSpec(trainers=0), HERE, "a-1", generation=1))
    now.sleep(60)
    screen.refresh(dict)
    assert capsys.readouterr().err == ""
