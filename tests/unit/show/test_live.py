"""The picture of a running job: what it contains at any size, and what the live view does with a terminal."""

import contextlib
import errno
import io
import os
import re
import sys

import pytest
from rich.console import Console
from support.plans import HERE, plan
from support.said import said
from support.scripted import Clock

from orchestrate import console
from orchestrate.record import events, run_dir
from orchestrate.record.outcomes import Activity, Outcome
from orchestrate.record.progress import parse
from orchestrate.show.live import MAX_LINES, MAX_WAITING, LiveScreen, shown
from orchestrate.show.render import picture, spark
from orchestrate.show.state import PACES, View
from orchestrate.show.tracking import PlainScreen, TrackingScreen
from orchestrate.spec.spec import JobSpec

HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"  # the cursor
KEYS = "Ctrl-C stops the job; closing the terminal does not"
TQDM = "Epoch 1:  45%|####5     | {}/270 [00:04<01:02,  2.00s/it, loss=0.25]"


def view(trainers: int) -> View:
    """A job whose workers have started at second 3."""
    found = View(plan(JobSpec(trainers=trainers), HERE, "digits-4f2a"), 0.0)
    found.event(events.WorkersStarted(), 3.0)
    return found


def drawn(state: View, now: float, width: int = 120, height: int = 40) -> list[str]:
    output = io.StringIO()
    Console(file=output, width=width, height=height).print(picture(state, now, width, height, KEYS))
    lines = output.getvalue().splitlines()
    assert all(len(line) <= width for line in lines) and len(lines) <= max(height // 2 + 1, 9), lines
    return [line.rstrip() for line in lines]


def test_a_line_must_show_the_state_of_each_worker():
    state = view(2)
    for step in range(10, 15):
        state.ranks[0].hear(said(TQDM.format(step)), 4.0 + step)
    state.activity({rank: Activity("R", 1.0, 256 << 20) for rank in range(3)}, 18.0)
    state.activity({0: Activity("R", 3.0, 256 << 20), 1: Activity("S", 1.0, 256 << 20)}, 20.0)
    state.event(events.WorkerEnded(2, "trainer-2", 1, False), 19.0)
    state.event(events.RestartDecided(True, "restart 1 of 3", 0.0, seconds=19.5), 19.0)
    state.enter("starting 3 nodes", 18.0)
    lines = drawn(state, 20.0)
    assert lines[0].startswith(f"{state.job_id}  20 s  starting 3 nodes (2 s)  loss 0.25")
    assert lines[1].startswith("step 14 of 270 ") and lines[1].endswith("5%  1:02 left in this epoch")
    assert re.split("  +", lines[2].strip()) == [
        *("0 master", "running", "step 14", "████", "2 s/step", "1.0 cores", "256 MiB", "loss 0.25"),
    ]
    assert re.split("  +", lines[3].strip()) == ["1 trainer-1", "running", "0.0 cores", "256 MiB", "waits 17 s"]
    assert re.split("  +", lines[4].strip()) == ["2 trainer-2", "failed", "0.0 cores", "256 MiB"]
    assert lines[5].strip() == "19.5 s  restarting all workers (restart 1 of 3)"
    assert lines[6] == KEYS


@pytest.mark.parametrize(("width", "height"), [(32, 8), (80, 24), (200, 60)])
@pytest.mark.parametrize("trainers", [0, 3, 63])
def test_the_picture_must_fit_any_terminal_and_show_the_workers_that_need_attention(width, height, trainers):
    state = view(trainers)
    last = state.ranks[trainers]
    for rank in state.ranks.values():
        rank.hear(said(TQDM.format(100)), 4.0)
    state.event(events.WorkerEnded(last.number, last.node, 1, False), 5.0)
    for _ in range(4):
        state.event(events.WarningIssued("long " * 50), 5.0)
    lines = drawn(state, 5.0, width, height)
    assert any(f"{last.number} {last.node}" in line for line in lines)
    shown = sum(bool(re.match(r" +\d+ (master|trainer)", line)) for line in lines)
    more = next((int(match[1]) for line in lines if (match := re.match("  and ([0-9]+) more", line))), 0)
    assert shown + more == trainers + 1


@pytest.mark.parametrize(
    ("line", "bar", "cells"),
    [
        ("step 0/90", "step 0 of 90 0%", "step 0"),
        ("step 1234", "step 1,234", "step 1,234"),
        ("| 135/270 [1:00:00<00:00, 4.00it/s]", f"step 135 of 270 {'━' * 20} 50%  0 s left", "step 135    250 ms/step"),
    ],
)
def test_a_bar_must_show_the_steps_of_the_job(line, bar, cells):
    state = view(0)
    state.hear(0, said(line), 4.0)
    lines = drawn(state, 4.0)
    assert re.sub(" {10,}", " ", lines[1]) == bar and lines[2] == f"  0 master  running  {cells}"


def test_a_new_generation_must_start_anew():
    state = view(1)
    state.ranks[0].hear(said(TQDM.format(100)), 4.0)
    state.planned(plan(JobSpec(trainers=0), HERE, "digits-4f2a", generation=1))
    state.began = 2.0
    assert drawn(state, 5.0)[0].startswith("digits-4f2a  3 s  generation 1")
    assert len(state.ranks) == 1 and not state.ranks[0].progress.step


def test_a_worker_must_not_be_idle_while_another_reports_steps():
    state = view(1)
    state.measure({"step": 1, "loss": 0.5}, 20.0)
    assert not any("idle" in line for line in drawn(state, 24.0))
    state.measure({"step": 1, "loss": 0.5}, 25.0)  # no other step
    assert [line.split()[0] for line in drawn(state, 26.0) if "waits" in line] == ["1"]
    assert [line.split()[0] for line in drawn(state, 46.0) if "  idle" in line] == ["0", "1"]
    assert drawn(state, 46.0)[-2].endswith(" stacks digits-4f2a shows where each is") and len(drawn(state, 44.0)) == 5


def test_metrics_of_the_script_must_be_shown():
    state = view(1)
    state.measure(
        {"step": 7, "total_steps": 20, "loss": 0.5, "note": "x", "\x1b[2J": 1, "a\x1b": 1, "huge": 1 << 2000}, 5.0
    )
    lines = drawn(state, 6.0)
    assert lines[0].endswith(" s  loss 0.5") and lines[1].startswith("step 7 of 20")


def test_a_metric_of_the_script_must_not_be_replaced_by_one_of_that_name_in_its_output():
    state = view(1)
    state.hear(0, said("epoch 1: loss 0.75, acc 0.5"), 4.0)
    state.measure({"step": 7, "loss": 0.5}, 5.0)
    state.hear(0, said("epoch 1: loss 0.25, acc 0.6"), 6.0)
    assert drawn(state, 6.0)[0].endswith("  loss 0.5  acc 0.6  epoch 1")
    state.measure({"step": 8, "loss": 0.125}, 7.0)
    assert drawn(state, 8.0)[0].endswith("  loss 0.125  acc 0.6  epoch 1")


def test_only_the_first_metrics_and_the_last_events_must_be_shown():
    state = view(1)
    state.measure({"loss": 1.0, "acc": 2.0, "first": 3.0, "second": 4.0}, 4.0)
    for number in range(10):
        state.event(events.WarningIssued(f"warning {number}"), 5.0)
    text = "\n".join(drawn(state, 6.0))
    assert "loss 1  acc 2  first 3" in text and "second" not in text
    assert re.findall("warning ([0-9])", text) == ["6", "7", "8", "9"]


def test_a_pace_must_be_that_of_the_last_steps():
    state = view(1)
    for step in range(1, 101):
        state.hear(0, said(f"step {step}"), 1000.0 + step)
    for step in range(1, 2 + PACES):
        state.hear(0, said(f"step {100 + step}"), 1100.0 + 2 * step)
    assert state.ranks[0].pace == 2.0


def steps(state: View, first: int, last: int) -> None:
    for step in range(first, last + 1):
        state.work.steps.record({"step": step})


def test_the_head_must_show_the_goodput_and_the_age_of_the_last_checkpoint():
    state = view(1)
    assert state.goodput(3.0) is None
    steps(state, 1, 10)
    assert state.goodput(13.0) == pytest.approx(10 / 13) and drawn(state, 13.0)[0] == "digits-4f2a  13 s"
    state.event(events.CheckpointSaved(), 14.0, age=2.0)
    state.event(generation_ended(), 13.0)
    assert state.goodput(20.0) == pytest.approx(10 / 20)
    state.planned(plan(JobSpec(trainers=1), HERE, "digits-4f2a"))
    state.event(events.WorkersStarted(), 20.0)
    steps(state, 6, 15)  # of these 20 steps, five are repeated ones
    assert state.goodput(30.0) == pytest.approx(20 * 15 / 20 / 30)
    assert drawn(state, 30.0)[0].endswith("  checkpoint 18 s ago") and "  check" not in drawn(state, 30.0, 79)[0]
    assert drawn(state, 60.0)[0].endswith("  checkpoint 48 s ago  goodput 62%")  # once its start matters less
    state.event(events.JobResumed(), 100.0)
    assert state.goodput(101.0) is None and drawn(state, 101.0)[0].startswith("digits-4f2a  1:41")


def test_steps_of_bars_must_not_count_as_repeated_and_after_a_restart_nothing_is_known_of_them():
    state = view(1)
    for step in [*range(10), *range(10)]:
        state.hear(0, said(TQDM.format(step)), 3.0 + step / 2)
    assert state.goodput(10.0) == pytest.approx(7 / 10)
    state.event(events.WorkersStarted(), 10.0)
    assert state.goodput(20.0) is None


def test_a_loss_that_is_no_longer_a_number_must_be_shown():
    state = view(1)
    state.measure({"step": 1, "loss": 2.5}, 4.0)
    state.measure({"step": 2, "loss": float("nan"), "grad": float("inf")}, 5.0)
    assert drawn(state, 6.0)[0].endswith("  loss NaN  grad Infinity")


def test_names_in_the_output_must_not_reach_the_terminal_as_control_characters():
    state = view(1)
    state.hear(0, said(r"{'\x1b\x5b2Jloss': 0.5, 'acc': 0.25}"), 4.0)
    assert drawn(state, 5.0)[0].endswith("acc 0.25") and "\x1b" not in "".join(drawn(state, 5.0))


@pytest.mark.parametrize("width", [60, 64, 80, 100, 200])
@pytest.mark.parametrize("node", ["trainer-1", "a-very-long-name-of-a-node"])
def test_an_idle_worker_must_be_seen_on_any_terminal(width, node):
    state = view(1)
    state.ranks[1].node = node
    for step in range(1, 40):
        state.hear(0, said(f"step {step} loss 0.123456 val_loss 0.98765"), 3.0 + step)
    assert any("running" in line and line.endswith("  idle 58 s") for line in drawn(state, 100.0, width))


def generation_ended() -> events.GenerationEnded:
    return events.GenerationEnded(generation=0, outcome=Outcome.FAILED, why="a worker failed")


@pytest.mark.parametrize("width", [80, 100, 110, 200])
def test_long_metrics_must_not_shorten_the_other_columns(width):
    state = view(1)
    for step in range(1, 40):
        state.hear(0, said(f"step {step} loss 0.123456 val_loss 0.98765 val_acc 0.55555 lr 0.0001"), 3.0 + step)
    state.activity({0: Activity("R", 1.0, 500 << 20)}, 43.0)
    first = drawn(state, 43.0, width)[-3]
    assert first.startswith("  0 master     running  step 39  "), first
    assert "1 s/step" in first and "loss 0.1235" in first and "500 MiB" in first, first


def test_a_sparkline_must_show_the_last_values_from_0_to_their_maximum():
    assert spark([1.0, 2.0, 4.0]) == "▃▅█" and spark([]) == "" and spark([0.0]) == "▁"
    assert spark([9.0, *[1.0] * 12]) == "█" * 12


def test_a_line_of_status_must_be_printed_from_time_to_time(paths, capsys):
    now = Clock()
    screen = PlainScreen(run_dir.load_for_display(paths)[1], paths, clock=now)

    def after(seconds: int, step: int) -> str:
        """What is printed meanwhile, if the script writes this step at the end."""
        for _ in range(seconds):
            now.sleep(1)
            screen.refresh(dict)
        with (paths.shared / "metrics.jsonl").open("a") as file:
            file.write(f'{{"step": {step}, "total_steps": 270, "loss": 0.25}}\n')
        return capsys.readouterr().err

    assert after(5, 100) == after(5, 110) == after(4, 120) == ""  # it is too early
    assert after(2, 130) == "a-1: step 120 of 270 (44%), 1:07 left, loss 0.25\n"
    assert after(58, 200) == ""
    assert after(2, 230).startswith("a-1: step 200 of 270 (74%)")
    assert after(60, 230).startswith("a-1: step 230 of 270 (85%)")
    assert after(120, 230) == ""  # nothing has changed


def test_a_line_of_status_must_show_the_state_of_a_progress_bar(paths, capsys):
    now = Clock()
    screen = PlainScreen(run_dir.load_for_display(paths)[1], paths, clock=now)
    now.sleep(16)
    screen.refresh(lambda: {0: parse(TQDM.format(135))})
    assert capsys.readouterr().err == "a-1: step 135 of 270 (50%), 1:02 left in this epoch, loss 0.25\n"


def test_only_the_end_of_long_metrics_must_be_read(paths, monkeypatch):
    monkeypatch.setattr("orchestrate.show.tracking.MAX_METRICS", 1000)
    (paths.shared / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in range(1000)))
    screen = TrackingScreen(run_dir.load_for_display(paths)[1], paths)
    screen.catch_up({})
    assert screen.view.lead.progress.step == 999


class Terminal(io.StringIO):
    """A terminal that may go away, and that does something when it is asked whether it is one."""

    gone: OSError | None = None

    def asked(self) -> None:
        pass

    def isatty(self) -> bool:
        self.asked()
        return True

    def write(self, text: str) -> int:
        if self.gone:
            raise self.gone
        return super().write(text)


def attached(monkeypatch) -> Terminal:
    """A terminal that messages go to; pytest would replace one that a fixture sets."""
    found = Terminal()
    monkeypatch.setattr(sys, "stderr", found)
    monkeypatch.setenv("TERM", "xterm")
    return found


def printed(terminal: Terminal) -> list[str]:
    return re.findall("line [0-9]+", terminal.getvalue())


def test_all_lines_must_be_on_the_terminal_when_the_view_closes(paths, monkeypatch):
    terminal = attached(monkeypatch)
    with pytest.raises(KeyError), shown(run_dir.load_for_display(paths)[1], paths, KEYS, str):
        for number in range(2):
            console.print_message(f"[/0] line {number}")
        raise KeyError
    assert re.findall(r"\[/0\] line .", terminal.getvalue()) == ["[/0] line 0", "[/0] line 1"]
    assert terminal.getvalue().rindex(SHOW) > terminal.getvalue().rindex(HIDE)
    later = attached(monkeypatch)
    console.print_message("line 2")
    assert printed(later) == ["line 2"]


def test_the_view_must_show_phases_activity_and_metrics_without_secrets(paths, monkeypatch):
    terminal = attached(monkeypatch)
    streams = sys.stdout, sys.stderr
    console.phase("before")
    (paths.shared / "metrics.jsonl").write_text('{"hunter2": 1, "loss": 0.5}\n')
    with shown(run_dir.load_for_display(paths)[1], paths, KEYS, lambda text: text.replace("hunter2", "***")) as screen:
        assert streams == (sys.stdout, sys.stderr) and screen.watch
        screen.watch({0: Activity("R", 1.0, 3 << 20)})
        screen.refresh(dict)
        assert "loss 0.5" in terminal.getvalue()
        console.phase("starting 3 nodes")
        console.progress("[0] 10%", console.phase)  # the view has the bars of all workers
    found = terminal.getvalue()
    assert found.startswith(f"before{HIDE}\r\x1b[K")
    texts = ("starting 3 nodes (0 s)", "3 MiB", "loss 0.5", KEYS, "hunter2", "10%")
    assert [text in found for text in texts] == [True] * 4 + [False] * 2


def test_a_line_that_is_printed_while_the_view_closes_must_be_on_the_terminal(paths, monkeypatch):
    terminal = attached(monkeypatch)
    with shown(run_dir.load_for_display(paths)[1], paths, KEYS, str) as screen:

        def close() -> None:
            terminal.asked = Terminal().asked
            console.attach(None)
            screen.close()

        terminal.asked = close
        console.print_message("line 0")
        assert printed(terminal) == ["line 0"]


def test_many_lines_must_not_wait_for_the_next_picture_and_be_printed_once(paths, monkeypatch):
    terminal = attached(monkeypatch)
    with shown(run_dir.load_for_display(paths)[1], paths, KEYS, str) as screen:
        for number in range(MAX_LINES):
            console.print_message(f"line {number}")
        assert len(printed(terminal)) == MAX_LINES
        console.print_message("x" * MAX_WAITING)
        assert "x" * 9 in terminal.getvalue()
        screen.refresh(dict)
    assert len(printed(terminal)) == MAX_LINES


def test_a_job_must_go_on_without_its_terminal_and_keep_nothing_for_it(paths, monkeypatch):
    terminal = attached(monkeypatch)
    with shown(run_dir.load_for_display(paths)[1], paths, KEYS, str) as screen:
        terminal.gone = OSError(errno.EIO, "Input/output error")
        for number in range(2 * MAX_LINES):
            console.print_message(f"line {number}")
        terminal.gone = None  # as if: what was kept would be printed now
        screen.refresh(dict)
    assert printed(terminal) == []


def test_lines_must_be_printed_once_a_busy_terminal_takes_them(paths, monkeypatch):
    terminal = attached(monkeypatch)
    with shown(run_dir.load_for_display(paths)[1], paths, KEYS, str) as screen:
        console.print_message("line 0")
        terminal.gone = BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        screen.refresh(dict)
        terminal.gone = None
    assert printed(terminal) == ["line 0"]


@pytest.mark.parametrize("number", [errno.EIO, errno.EAGAIN])
def test_a_terminal_that_does_not_take_the_last_picture_must_not_end_the_job(paths, monkeypatch, number):
    terminal = attached(monkeypatch)
    with shown(run_dir.load_for_display(paths)[1], paths, KEYS, str):
        terminal.gone = OSError(number, os.strerror(number))


@pytest.mark.parametrize(("seconds", "tenths"), [(0.02, 10), (0.0, 3)])  # 2% of a core
def test_pictures_must_be_drawn_less_often_if_they_take_long(paths, monkeypatch, seconds, tenths):
    attached(monkeypatch)
    clock, drawings = Clock(), list[float]()
    with contextlib.closing(
        LiveScreen(run_dir.load_for_display(paths)[1], paths, KEYS, clock=clock, cpu=lambda: len(drawings) * seconds)
    ) as screen:

        def bars() -> dict:  # is asked for each picture
            drawings.append(clock.now)
            return {}

        for tenth in range(30):
            clock.now = 100.0 + tenth / 10
            screen.refresh(bars)
    assert drawings == [100.0 + tenth / 10 for tenth in range(0, 30, tenths)]
