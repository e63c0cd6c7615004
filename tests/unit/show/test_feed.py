"""The output of workers must be shown while their job runs, in order and as a whole."""

import contextlib
import dataclasses
import io
import os
import pty
import signal
import sys
import threading

import pytest
from support.commanded import SPEC, Whole, create, supervise, terminal_text, watched
from support.methods import after, raising
from support.optional import not_none
from support.scripted import ALL_WELL, KILLED
from support.waiting import eventually

from orchestrate import patience
from orchestrate.console import print_message, stream
from orchestrate.record import run_dir
from orchestrate.record.logs import rest
from orchestrate.record.outcomes import WorkerExit
from orchestrate.record.paths import JobPaths
from orchestrate.record.times import Times, TimesWriter
from orchestrate.show import feed
from orchestrate.show.format import Printer, Style
from orchestrate.show.live import shown as live
from orchestrate.show.screen import Display, Screen
from orchestrate.spec.spec import JobSpec
from orchestrate.supervise import launch


@pytest.fixture
def paths(tmp_path):
    return JobPaths(tmp_path / "runs" / "a-1")


def test_all_worker_output_must_be_shown_before_the_end_with_node_and_rank(paths):
    create(paths)
    engine = Whole([ALL_WELL])
    start = engine.start

    def write(plan, stopped=None) -> None:
        start(plan)
        paths.log(0).write_text("first\nlast, without a newline")
        paths.log(2).write_text("[node] generation 0\nother\n")

    engine.start = write
    _, shown = supervise(paths, engine)
    assert sorted(line for line in shown if line.startswith("[")) == [
        "[0] first",
        "[0] last, without a newline",
        "[2] other",  # generation markers are left out: the supervisor prints its own message
    ]


def test_the_end_of_a_generation_must_be_shown_before_output_of_the_next(paths, monkeypatch):
    # so that only our own messages trigger a read of the logs
    monkeypatch.setattr(feed, "INTERVAL", (3600.0, 3600.0))
    create(paths)
    engine, shown = Whole([[WorkerExit(0, 1)]], [ALL_WELL]), []
    start = engine.start

    def write(plan, stopped=None) -> None:
        start(plan)
        if engine.calls.count("start") == 2:
            eventually(lambda: any("restarting all workers" in line for line in shown), timeout=30)
        paths.log(0).write_text("hello\n" * engine.calls.count("start"))

    engine.start = write
    launch.supervise(paths, engine, lambda: 0, watched(paths, Display(shown.append)))
    hello = [index for index, line in enumerate(shown) if "hello" in line]
    again = [index for index, line in enumerate(shown) if "restarting all workers" in line]
    assert len(hello) == 2 and len(again) == 1 and hello[0] < again[0] < hello[1]


def test_a_flood_of_lines_must_not_delay_the_end_or_our_messages(paths, monkeypatch):
    monkeypatch.setattr(feed, "LAST_LINES_TIMEOUT", -1.0)
    monkeypatch.setattr(feed, "MAX_READ", 1 << 17)
    create(paths)
    engine = Whole([ALL_WELL])
    engine.start = after(engine.start, lambda: paths.log(0).write_text("\n" * (1 << 20)))
    _, shown = supervise(paths, engine)
    assert f"warning: some worker output was not shown: see {paths.logs}" in shown[-3:]
    assert shown.count("[0] ") < 1 << 20


def test_a_flood_from_many_workers_must_not_delay_the_end(paths, monkeypatch):
    monkeypatch.setattr(feed, "LAST_LINES_TIMEOUT", -1.0)
    monkeypatch.setattr(feed, "MAX_SHOW_SECONDS", 0.01)
    monkeypatch.setattr(feed, "MAX_READ", 1 << 17)
    create(paths)
    engine = Whole([ALL_WELL])
    start = engine.start

    def write(plan, stopped=None) -> None:
        start(plan)
        for rank in range(3):
            paths.log(rank).write_text("\n" * (1 << 17))  # the amount that is read of each at a time

    engine.start = write
    _, shown = supervise(paths, engine)
    assert f"warning: some worker output was not shown: see {paths.logs}" in shown[-3:]
    assert len(shown) < 1 << 17


def test_lines_left_over_from_a_long_turn_must_be_shown_in_the_next_turns(paths, monkeypatch):
    monkeypatch.setattr(feed, "MAX_SHOW_SECONDS", -1.0)
    create(paths)
    engine = Whole([ALL_WELL])
    written = [f"line {number}" for number in range(300)]
    engine.start = after(engine.start, lambda: paths.log(0).write_text("\n".join(written)))
    _, shown = supervise(paths, engine)
    assert [line.removeprefix("[0] ") for line in shown if line.startswith("[0]")] == written


def test_output_of_replacement_nodes_must_be_shown_under_their_own_names(paths, monkeypatch):
    monkeypatch.setattr("orchestrate.supervise.nodes.MAX_ATTEMPTS", 1)
    create(paths, dataclasses.replace(SPEC, min_trainers=0))
    engine = Whole([KILLED], [[WorkerExit(0, 0), WorkerExit(1, 0)]])
    start = engine.start

    def write(plan, stopped=None) -> None:
        start(plan)
        engine.missing.add("trainer-1")
        with paths.log(1).open("a") as file:
            file.write(f"of {plan.workers[1].node}\n")

    engine.start = write
    _, shown = supervise(paths, engine)
    assert "[1] of trainer-2" in shown


def test_lines_must_be_shown_from_the_last_shown_position(paths):
    create(paths)
    paths.log(0).write_text("".join(f"line {number}\n" for number in range(1000)))
    follower = rest(paths, *run_dir.load(paths))
    last = [line.text for line in follower.lines()]
    assert last[-1] == "line 999" and len(last) < 1000
    with paths.log(0).open("a") as file:
        file.write("new\n")
    _, shown = supervise(paths, Whole([ALL_WELL]), follower=follower)
    assert [line for line in shown if line.startswith("[")] == ["[0] new"]


def test_worker_output_must_be_shown_before_a_later_message_of_ours(paths):
    create(paths)
    release, shown = threading.Event(), []

    def show(line: str) -> None:
        shown.append(line)
        release.set()

    out = watched(paths, Display(show), rest(paths, *run_dir.load(paths)))
    with out.following():
        paths.log(0).write_text("of a worker\n")
        out.in_turn(lambda: show("ours"))
        out.in_turn(lambda: show("ours again"))
    assert release.is_set() and shown == ["[0] of a worker", "ours", "ours again"]
    out.in_turn(lambda: show("late"))  # for example, a warning about the report
    assert shown[-1] == "late"


def test_the_times_and_colors_of_all_lines_must_be_kept(paths):
    create(paths)
    shown: list[str] = []
    out = watched(paths, Display(shown.append, style=Style(colors=True)))
    with out.following():
        paths.log(0).write_text("\x1b[31mred\x1b[0m\n")
        eventually(paths.times.exists)
        with paths.log(0).open("a") as file:
            file.write("last\n")
    times = Times(paths.times, 3)
    assert "\x1b[31mred" in shown[0] and times.at(0, 0) and times.at(0, len("\x1b[31mred\x1b[0m\n"))


def test_worker_output_must_be_shown_even_if_the_supervisor_crashes(paths):
    create(paths)
    engine, shown = Whole([]), []
    engine.start = after(engine.start, lambda: paths.log(0).write_text("last"))
    engine.wait = raising(KeyError)
    before = threading.active_count()
    with pytest.raises(KeyError):
        launch.supervise(paths, engine, lambda: 0, watched(paths, Display(shown.append)))
    assert shown[-1] == "[0] last"
    eventually(lambda: threading.active_count() <= before)


def test_a_reader_that_stops_reading_must_not_block_the_supervisor(paths, monkeypatch):
    monkeypatch.setattr(feed, "READER_TIMEOUT", 0.01)
    create(paths)
    engine, resume = Whole([KILLED], [ALL_WELL]), threading.Event()

    def show(line: str) -> None:
        resume.wait(60)

    data = launch.supervise(paths, engine, lambda: 0, watched(paths, Display(show)))
    resume.set()
    assert (data["outcome"], data["generations"]) == ("succeeded", 2)


@pytest.mark.parametrize("reads", [False, True], ids=["stopped", "slow"])
def test_the_last_metrics_must_be_in_the_report_whoever_reads_the_output(paths, monkeypatch, reads):
    monkeypatch.setattr(feed, "READER_TIMEOUT", 60.0 if reads else 0.01)
    monkeypatch.setattr(feed, "LAST_LINES_TIMEOUT", -1.0)
    monkeypatch.setattr(feed, "MAX_READ", 1 << 12)
    create(paths)
    engine, resume = Whole([ALL_WELL]), threading.Event()
    text = "".join(f"step {step} loss: {1 / step:.9f}\n" for step in range(1, 20_000))
    engine.start = after(engine.start, lambda: paths.log(0).write_text(text))
    display = Display(lambda line: None, lambda line: None if reads else (resume.wait(60), None)[1])
    data = launch.supervise(paths, engine, lambda: 0, watched(paths, display))
    resume.set()
    assert data["final_metrics"]["loss"] == 0.000050003


@pytest.mark.parametrize(("seconds", "found"), [(5.0, {"acc": 0.25, "loss": 0.5}), (0.0, None)])
def test_what_workers_have_written_between_two_supervisors_must_be_in_the_report(paths, monkeypatch, seconds, found):
    """Unless there is so much of it that the search would take minutes."""
    monkeypatch.setattr(feed, "UNSEEN_SECONDS", seconds)
    create(paths)
    first = "step 1 loss: 0.9\n"
    paths.log(0).write_text(first + "step 2 loss: 0.5 acc: 0.25\n" + f"{'-' * 99}\n" * 1000)
    TimesWriter(paths.times).note({0: len(first)})
    follower = rest(paths, *run_dir.load(paths))
    data, shown = supervise(paths, Whole([ALL_WELL]), follower=follower)
    assert (data["final_metrics"] or None) == found and not any("loss" in line for line in shown)


def test_an_error_in_the_output_thread_must_not_end_all_output(paths, monkeypatch):
    create(paths)
    engine, texts, calls = Whole([ALL_WELL]), Printer.texts, []

    def broken(*arguments):
        calls.append(1)
        if len(calls) == 1:
            raise KeyError("a bug")
        return texts(*arguments)

    monkeypatch.setattr(Printer, "texts", broken)
    engine.start = after(engine.start, lambda: paths.log(0).write_text("a line\n"))
    _, shown = supervise(paths, engine)
    assert "[0] a line" in shown


def test_a_long_line_that_arrives_in_parts_must_be_shown_at_the_end(paths, monkeypatch):
    monkeypatch.setattr(feed, "MAX_READ", 1000)
    monkeypatch.setattr(feed, "MIN_READ", 1000)
    create(paths)
    engine = Whole([ALL_WELL])
    engine.start = after(engine.start, lambda: paths.log(0).write_text("x" * 100_000 + "\nlast\n"))
    _, shown = supervise(paths, engine)
    assert "[0] last" in shown


def test_a_progress_bar_must_go_to_the_same_stream_as_worker_output(paths, monkeypatch):
    """Stdout may be reserved for the report."""
    monkeypatch.setattr("orchestrate.console.PROGRESS_INTERVAL", -1.0)
    create(paths)
    engine, shown, lines = Whole([[], ALL_WELL]), [], []
    engine.start = after(engine.start, lambda: paths.log(0).write_text("10%\r"))
    engine.wait, wait = lambda timeout: (eventually(lambda: lines), wait(timeout))[1], engine.wait
    launch.supervise(paths, engine, lambda: 0, watched(paths, Display(shown.append, lines.append)))
    assert lines[0] == "[0] 10%" and not any("10%" in line for line in shown)


class Stuck(io.StringIO):
    """A stdout that is not read."""

    resume = threading.Event()

    def write(self, text: str) -> int:
        self.resume.wait()
        return len(text)


@pytest.mark.timeout(60)
def test_an_unread_stdout_must_not_block_the_supervisor(paths, monkeypatch):
    monkeypatch.setattr(feed, "READER_TIMEOUT", 0.01)
    monkeypatch.setattr(sys, "stdout", Stuck())
    create(paths)
    paths.log(0).write_text("line\n")
    data = launch.supervise(
        paths, Whole([KILLED], [ALL_WELL]), lambda: 0, watched(paths, Display(lambda _: None, stream))
    )
    Stuck.resume.set()
    assert (data["outcome"], data["generations"]) == ("succeeded", 2)


def test_prefixes_must_name_the_nodes_of_the_generation_that_runs(paths):
    create(paths, JobSpec(trainers=2, nproc_per_node=2, min_trainers=1, grace=0.01))
    engine = Whole([KILLED], [[WorkerExit(rank, 0) for rank in range(4)]])
    start = engine.start

    def write(plan, stopped=None) -> None:
        start(plan)
        engine.missing = {"trainer-1"}
        paths.log(2).write_text("hello\n" * len(engine.plans))

    engine.start = write
    report, shown = supervise(paths, engine)
    assert report["outcome"] == "succeeded"
    assert [line for line in shown if "hello" in line] == ["[trainer-1 2] hello", "[trainer-2 2] hello"]


def test_output_that_is_not_read_must_not_keep_a_job_that_was_asked_to_stop(paths):
    create(paths)
    asked, release, main = threading.Event(), threading.Event(), not_none(threading.main_thread().ident)

    def show(line: str) -> None:
        if not release.is_set():
            out.done.wait()
            while not asked.wait(0.01):  # as patience does: one that arrives before a wait does not interrupt it
                signal.pthread_kill(main, patience.SIGNAL)
            release.wait()

    def late(number: int, frame: object) -> None:
        if not asked.is_set():
            asked.set()
            raise patience.Abandoned

    out = watched(paths, Display(show), rest(paths, *run_dir.load(paths)))
    handler = signal.signal(patience.SIGNAL, late)
    try:
        with out.following():
            paths.log(0).write_text("of a worker\n")
    finally:
        signal.signal(patience.SIGNAL, handler)
        release.set()


def test_the_progress_of_one_rank_must_be_read_line_by_line_and_that_of_the_others_as_it_is_now(paths):
    create(paths)
    screen, seen = Screen(), {}
    screen.heard = lambda rank, found: seen.setdefault(rank, [one.step for one in found])
    for rank in (0, 1):
        paths.log(rank).write_text("".join(f"step {step}\n" for step in range(1000)))
    assert watched(paths, Display(print, screen=screen)).turn()
    assert seen[0] == [*range(1000)] and seen[1][-1] == 999 and len(seen[1]) < 100


def test_patterns_must_be_searched_in_the_output_of_rank_0_only(paths):
    create(paths, dataclasses.replace(SPEC, metrics={"mine": r"Loss: ([0-9.]+)"}))
    seen: list[tuple[int, list[dict[str, float]]]] = []
    screen = Screen()
    screen.heard = lambda rank, found: seen.append((rank, [one.metrics for one in found]))
    for rank in (0, 1):
        paths.log(rank).write_text("Loss: 0.5  loss 7\nhello\n")
    out = watched(paths, Display(print, screen=screen))
    assert out.turn() and not out.turn()
    assert seen == [(0, [{"mine": 0.5}]), (1, [{"loss": 7.0}])]


@pytest.mark.parametrize(
    ("texts", "patterns", "taken"),
    [
        ({0: "loss 1", 1: "loss 2"}, {}, [1.0]),
        ({0: "hello", 2: "loss 3"}, {}, [3.0]),
        ({0: "hello", 2: "loss 3"}, {"loss": r"loss ([0-9])"}, []),
    ],
)
def test_the_progress_of_another_rank_must_count_if_rank_0_prints_none(paths, texts, patterns, taken):
    create(paths, dataclasses.replace(SPEC, metrics=patterns))
    for rank, text in texts.items():
        paths.log(rank).write_text(f"{text}\n")
    out, found = watched(paths, Display(print)), []
    out.listeners.append(lambda progress: found.append(progress.metrics["loss"]))
    assert out.turn() and found == taken


@pytest.mark.timeout(120)
def test_a_terminal_that_is_not_read_must_block_neither_the_supervisor_nor_the_end(paths, monkeypatch):
    """The live view holds a lock while it writes."""
    for name in ("orchestrate.show.feed.READER_TIMEOUT", "orchestrate.show.live.LOCK_TIMEOUT"):
        monkeypatch.setattr(name, 0.1)
    monkeypatch.setenv("TERM", "xterm")
    create(paths)
    paths.log(0).write_text("a line\n" * 100_000)
    leader, follower = pty.openpty()
    before, tty = threading.active_count(), os.fdopen(follower, "w")
    with (
        contextlib.redirect_stdout(tty),
        contextlib.redirect_stderr(tty),
        live(run_dir.load(paths)[1], paths, "", str) as screen,
    ):
        engine = Whole([*[[]] * 30, KILLED], [*[[]] * 30, ALL_WELL])
        display = Display(print_message, stream, screen=screen)
        data = launch.supervise(paths, engine, lambda: 0, watched(paths, display))
    assert (data["outcome"], data["generations"]) == ("succeeded", 2) and paths.report.exists()
    reading = threading.Thread(target=terminal_text, args=[leader])
    reading.start()
    eventually(lambda: threading.active_count() <= before + 1, timeout=60)
    tty.close()
    reading.join()
