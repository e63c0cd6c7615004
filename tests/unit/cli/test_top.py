"""`top`: what the workers of a running job use, on a scripted engine."""

import contextlib
import dataclasses
import io
import json
import os
import pty
import re

import pytest
from rich.console import Console
from support.commanded import Meanwhile, create, end, supervised, terminal_text
from support.methods import raising
from support.plans import HERE, plan
from support.scripted import Clock

from orchestrate import console
from orchestrate.host import gpus
from orchestrate.record import usage
from orchestrate.record.outcomes import Activity
from orchestrate.record.paths import JobPaths
from orchestrate.show.top import COLUMNS, HISTORY, Meter, Top, full_screen
from orchestrate.spec.spec import JobSpec


def drawn(top: Top, height: int = 20) -> list[list[str]]:
    console = Console(width=160)
    with console.capture() as output:
        console.print(top.table(height))
    title, *lines = output.get().splitlines()
    assert title.strip() == "digits-4f2a"
    return [line.split() for line in lines]


def test_the_table_must_show_what_each_worker_uses():
    top = Top(plan(JobSpec(trainers=2), HERE, "digits-4f2a"), cores=4.0)
    for second in range(1, 4):
        found = {
            0: Activity("R", 4.0 * second, 1 << 30, pid=4711),
            1: Activity("S", 1.0 - second, 1 << 20),
            7: Activity("R", 1.0),
        }
        top.record(2.0 * second, found)
    top.record(6.0, {0: Activity("R", 99.0, 0)})  # no new sample
    assert drawn(top) == [
        ["rank", "node", "pid", "state", "cores", "memory"],
        ["0", "master", "4711", "running", "2.0", "▅▅", "1", "GiB"],
        ["1", "trainer-1", "starting", "0.0", "▁▁", "1", "MiB"],
        ["2", "trainer-2"],
    ]
    assert drawn(top, height=1) == [*drawn(top)[:2], ["and", "2", "more"]]
    assert drawn(top, height=0) == drawn(top, height=1)
    top.record(8.0, {0: Activity("I", 12.0, pid=7), 2: Activity("R", 0.0, pid=8)})
    top.record(10.0, {0: Activity("I", 12.0, pid=7), 2: Activity("R", 8.0, pid=8)})
    rows = [["0", "master", "7", "I", "0.0", "▅▅▁▁"], ["2", "trainer-2", "8", "running", "4.0", "█"]]
    rows.append(["and", "1", "more"])
    assert drawn(top, height=2)[1:] == rows


def test_nothing_must_be_shown_of_a_worker_that_no_longer_reports_and_its_gap_be_left_out():
    top = Top(plan(JobSpec(trainers=1), HERE, "digits-4f2a"), cores=4.0)
    for second in (1.0, 2.0):
        top.record(second, {0: Activity("R", 4 * second, 1 << 30, pid=6), 1: Activity("R", 4 * second, 1 << 20, pid=7)})
    top.record(3.0, {0: Activity("R", 12.0, 1 << 30, pid=6)})
    assert drawn(top)[1:] == [["0", "master", "6", "running", "4.0", "██", "1", "GiB"], ["1", "trainer-1", "█"]]
    top.record(4.0, {1: Activity("S", 8.0, 1 << 20, pid=7)})
    assert drawn(top)[1:] == [["0", "master", "██"], ["1", "trainer-1", "7", "sleeping", "█", "1", "MiB"]]


def test_all_workers_must_be_printed_without_a_terminal():
    lines = Top(plan(JobSpec(trainers=99), HERE, "digits-4f2a"), cores=4.0).lines()
    assert lines[0] == "digits-4f2a" and [line.split()[0] for line in lines[2:]] == [str(rank) for rank in range(100)]


def test_the_table_must_fill_the_terminal_and_leave_nothing_there(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("LINES", "12")
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    with contextlib.redirect_stdout(terminal), full_screen(Top(plan(JobSpec(trainers=9), HERE, "a-1"), 4.0)) as draw:
        draw()
        text = terminal.getvalue()
    assert "a-1  Ctrl-C quits; the job continues" in text and "and 3 more" in text
    assert text.startswith("\x1b[?1049h") and "\x1b[?1049l" in terminal.getvalue().removeprefix(text)


def test_gpus_must_be_shown_if_they_are_known():
    job = plan(JobSpec(trainers=1), HERE, "digits-4f2a")
    first, second = job.workers
    workers = dataclasses.replace(first, gpu="GPU-a"), dataclasses.replace(second, gpu="GPU-c")
    top = Top(dataclasses.replace(job, gpus=("GPU-a", "GPU-c"), workers=workers), cores=4.0)
    top.take_gpus({"GPU-b": (1.0, 1 << 30)})  # of another job
    assert drawn(top)[0] == ["rank", "node", "pid", "state", "cores", "memory"]
    for share, memory in [*[(0.95, 1)] * (COLUMNS - 1), (0.37, 3)]:
        top.take_gpus({"GPU-a": (share, memory << 30), "GPU-b": (1.0, 1 << 30)})
    curve = "█" * (COLUMNS - 1) + "▃"
    assert drawn(top)[0][-2:] == ["gpu", "memory"] and drawn(top)[1][-4:] == ["37%", curve, "3", "GiB"]
    assert drawn(top)[2] == ["1", "trainer-1"] and top.lines()[2].endswith("3 GiB")


def test_the_height_of_a_curve_must_be_the_peak_and_its_color_the_mean():
    meter = Meter()
    meter.samples.extend([0.0, 1.0] * COLUMNS)
    curve = meter.curve()
    assert curve.plain == "█" * COLUMNS and {span.style for span in curve.spans} == {"green"}
    assert Meter().curve().plain == ""


def test_a_curve_must_fit_its_column_and_show_the_last_samples():
    meter = Meter()
    for number in range(2 * HISTORY):
        meter.samples.append(1.0 if number < HISTORY else 0.0)
        assert 0 < len(meter.curve()) <= COLUMNS
    assert meter.curve().plain == "▁" * COLUMNS


def test_the_use_of_gpus_must_be_read(monkeypatch, tmp_path):
    text = "GPU-1a-2b, 37, 1024\nGPU-x, [N/A], 5\nFailed to initialize NVML\n\nGPU-3, 0, 0\n"
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\necho '{text}'")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert gpus.utilization() == {"GPU-1a-2b": (0.37, 1 << 30), "GPU-3": (0.0, 0)}


def test_a_supervisor_must_write_only_while_it_is_asked(paths):
    before = len(os.listdir("/proc/self/fd"))
    assert not usage.asked(paths) and usage.read(paths) == (0.0, {})
    usage.ask(paths)
    assert usage.asked(paths) and len(os.listdir("/proc/self/fd")) <= before
    usage.write(paths, {1: Activity("R", 1.5, 7)})
    when, found = usage.read(paths)
    assert when > 1e9 and found == {1: Activity("R", 1.5, 7)}
    for when in (0, 1 << 32):  # long ago, and before the clock was set back
        os.utime(paths.usage_asked, (when, when))
        assert not usage.asked(paths)
    usage.remove(paths)
    usage.remove(paths)
    assert not paths.usage.exists() and not paths.usage_asked.exists()


@pytest.mark.parametrize(
    "content",
    [
        *("", "[]", "{}", '{"time": 1, "workers": []}', '{"time": 1, "workers": {"x": {}}}'),
        *('{"time": "x", "workers": {}}', "[" * 100_000, '{"time": Infinity, "workers": {}}'),
        *('{"time": 1e18, "workers": {}}', '{"time": 1, "workers": {"0": {"state": "R", "cpu": NaN, "memory": 1}}}'),
        '{"time": 1, "workers": {"0": {"state": "R", "cpu": 1, "memory": Infinity}}}',
        r'{"time": 1, "workers": {"0": {"pid": 1, "state": "\u001b]0;x\u0007", "cpu": 1, "memory": 1}}}',
    ],
)
def test_a_damaged_file_must_count_as_none(paths, content):
    paths.usage.write_text(content)
    assert usage.read(paths) == (0.0, {})


def test_a_link_must_not_be_followed(paths, tmp_path):
    paths.usage_asked.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic"):
        usage.ask(paths)


def test_a_supervisor_must_be_asked_as_long_as_the_command_runs(do, paths):
    turns = []

    def later() -> None:
        assert usage.asked(paths)
        os.utime(paths.usage_asked, (0, 0))  # as after ten seconds
        turns.append(0)
        if len(turns) > 2:
            usage.write(paths, {0: Activity("R", len(turns), 1 << 30)})

    do.clock = Meanwhile(later)
    with supervised(paths.root):
        code, out, _ = do("top", "a-1")
    assert code == 0 and "1 GiB" in "".join(out) and len(turns) == 4
    do.clock = Meanwhile(raising(KeyboardInterrupt))
    with supervised(paths.root):
        assert do("top", "a-1")[::2] == (0, [])


@pytest.mark.parametrize(("options", "count"), [([], 5), (["--once"], 2)])
def test_a_terminal_must_show_the_table_until_the_job_ends_or_once_on_request(do, runs, monkeypatch, options, count):
    monkeypatch.setenv("TERM", "xterm")
    paths, turns = create(JobPaths(runs / "a-1"), JobSpec(trainers=0, cpus=2.0)), []

    def later() -> None:
        turns.append(0)
        row = {"state": "R", "cpu": 2 * len(turns), "memory": 1 << 20, "pid": 7}
        paths.usage.write_text(json.dumps({"time": len(turns), "workers": {"0": row}}))
        end(paths) if len(turns) == 5 else None

    do.clock = Meanwhile(later)
    leader, follower = pty.openpty()
    with supervised(paths.root), os.fdopen(follower, "w") as tty, contextlib.redirect_stdout(tty):
        assert do("top", "a-1", *options)[0] == 0
    text = terminal_text(leader)
    assert len(turns) == count and ("Ctrl-C quits" in text) == (not options)
    assert re.search("running +2.0 +█", console.clean(text))  # of the two cores that it may use


def test_a_job_that_has_ended_or_reports_nothing_must_be_an_error(do, paths):
    do.clock = Clock()
    with supervised(paths.root):
        code, _, messages = do("top", "a-1")
    assert code == 1 and messages[0] == "error: the supervisor of a-1 does not report what its workers use"
    assert do("top", "a-1")[2][0].startswith("error: a-1 has no supervisor")
    end(paths)
    code, _, messages = do("top", "a-1")
    assert code == 2 and messages[0] == "error: a-1 has ended"
