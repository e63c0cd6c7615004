"""The picture of a running job: what it contains at any size, and what the live view does with a terminal."""

import io
import os
import pty
import re
import select
import subprocess
import sys

import pytest
from conftest import eventually
from rich.console import Console
from support.plans import HERE, plan

from orchestrate.job import events
from orchestrate.job.outcomes import Activity
from orchestrate.job.spec import JobSpec
from orchestrate.view.render import clock, picture, spark
from orchestrate.view.state import View

TQDM = "Epoch 1:  45%|####5     | {}/270 [00:04<01:02,  2.00s/it, loss=0.25]"


def view(trainers: int) -> View:
    """A job whose workers have started at second 3."""
    found = View(plan(JobSpec(trainers=trainers), HERE, "digits-4f2a"), 0.0)
    found.event(events.WorkersStarted(), 3.0)
    return found


def drawn(state: View, now: float, width: int = 120, height: int = 40) -> list[str]:
    output = io.StringIO()
    Console(file=output, width=width, height=height).print(picture(state, now, width, height))
    lines = output.getvalue().splitlines()
    assert all(len(line) <= width for line in lines) and len(lines) <= max(height // 2 + 1, 9), lines
    return [line.rstrip() for line in lines]


def test_a_line_must_show_the_state_of_each_worker():
    state = view(2)
    for step in range(10, 15):
        state.ranks[0].line(TQDM.format(step), 4.0 + step)
    state.activity({rank: Activity("R", 1.0, 256 << 20) for rank in range(3)}, 18.0)
    state.activity({0: Activity("R", 3.0, 256 << 20), 1: Activity("S", 1.0, 256 << 20)}, 20.0)
    state.event(events.WorkerEnded(2, "trainer-2", 1, False), 19.0)
    state.event(events.RestartDecided(True, "restart 1 of 3", 0.0, seconds=19.5), 19.0)
    state.enter("starting 3 nodes", 18.0)
    lines = drawn(state, 20.0)
    assert lines[0].startswith(f"{state.job_id}  20 s  starting 3 nodes (2 s)  loss 0.25")
    assert lines[1].startswith("step 14 of 270 ") and lines[1].endswith("5%  1:02 left")
    assert re.split("  +", lines[2].strip()) == [
        *("0 master", "running", "step 14", "████", "2 s/step", "1.0 cores", "256 MiB", "loss 0.25"),
    ]
    assert re.split("  +", lines[3].strip()) == ["1 trainer-1", "running", "0.0 cores", "256 MiB", "idle 17 s"]
    assert re.split("  +", lines[4].strip())[:2] == ["2 trainer-2", "failed"]
    assert lines[5].strip() == "19.5 s  restarting all workers (restart 1 of 3)"
    assert lines[6] == "Ctrl-C stops the job; closing the terminal does not"


@pytest.mark.parametrize(("width", "height"), [(32, 8), (80, 24), (200, 60)])
@pytest.mark.parametrize("trainers", [0, 3, 63])
def test_the_picture_must_fit_any_terminal_and_show_the_workers_that_need_attention(width, height, trainers):
    state = view(trainers)
    last = state.ranks[trainers]
    for rank in state.ranks.values():
        rank.line(TQDM.format(100), 4.0)
    state.event(events.WorkerEnded(last.number, last.node, 1, False), 5.0)
    lines = drawn(state, 5.0, width, height)
    assert any(f"{last.number} {last.node}" in line for line in lines)
    shown = sum(bool(re.match(r" +\d+ (master|trainer)", line)) for line in lines)
    more = next((int(match[1]) for line in lines if (match := re.match("  and ([0-9]+) more", line))), 0)
    assert shown + more == trainers + 1


def test_a_new_generation_must_start_anew():
    state = view(1)
    state.ranks[0].line(TQDM.format(100), 4.0)
    state.planned(plan(JobSpec(trainers=0), HERE, "digits-4f2a", generation=1))
    assert "generation 1" in drawn(state, 5.0)[0] and len(state.ranks) == 1 and not state.ranks[0].progress.step


def test_metrics_of_the_script_must_be_shown():
    state = view(1)
    state.measure({"step": 7, "total_steps": 20, "loss": 0.5, "note": "x", "\x1b[2J": 1, "huge": 1 << 2000}, 5.0)
    lines = drawn(state, 6.0)
    assert "loss 0.5" in lines[0] and lines[1].startswith("step 7 of 20")


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (59.9, "59 s"), (125, "2:05"), (3725, "1:02:05"), (-1, "0 s")]
)
def test_durations_must_be_short(seconds, text):
    assert clock(seconds) == text


def test_a_sparkline_must_show_the_last_values_from_0_to_their_maximum():
    assert spark([1.0, 2.0, 4.0]) == "▃▅█" and spark([]) == "" and spark([0.0]) == "▁"
    assert len(spark([1.0] * 100)) == 12


SCRIPT = """
import os, pathlib, sys, time
for step in range(3):
    sys.stderr.write(f"\\r{step}%|#| {step}/3 [00:01<00:02, 1.00it/s, loss=0.5]")
    sys.stderr.flush()
print("\\na whole line", flush=True)
sys.stderr.write("\\r1%|#| 2/3 [00:01<00:02, 1.00it/s, loss=0.5]")
sys.stderr.flush()
while not pathlib.Path(os.environ["JOB_DIR"], "finish").exists(): time.sleep(0.05)
"""


def test_a_terminal_must_show_the_picture_below_the_output_and_nothing_of_it_at_the_end(cli, nothing_left):
    (cli.folder / "bar.py").write_text(SCRIPT)
    ours, theirs = pty.openpty()
    env = cli.env | {"TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"}
    command = [sys.executable, "-m", "orchestrate", "run", "--engine", "process", "--trainers", "1", "bar.py"]
    with subprocess.Popen(command, cwd=cli.folder, env=env, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        seen = bytearray()

        def shown(text: str) -> bool:
            if select.select([ours], [], [], 0.1)[0]:
                seen.extend(os.read(ours, 1 << 16))
            return text.encode() in seen

        eventually(lambda: shown("step 2 of 3"))
        eventually(lambda: shown("trainer-1 1 | a whole line"))
        cli.finish_jobs()
        eventually(lambda: shown("succeeded: 2 workers"))
        assert process.wait(timeout=60) == 0
    os.close(ours)
    rest = bytes(seen).rpartition(b"Ctrl-C stops the job")[2].decode()
    assert rest.count("\x1b[2K") >= 5 and "succeeded: 2 workers" in rest  # the picture is erased
    assert bytes(seen).count(b"a whole line") == 2  # once for each rank


def test_lines_must_be_plain_on_request_and_without_a_terminal(cli, nothing_left):
    (cli.folder / "say.py").write_text("print('hello')\n")
    done = cli("run", "--engine", "process", "--trainers", "0", "say.py", TERM="xterm-256color")
    assert "\x1b" not in done.stdout + done.stderr and done.stdout == "master 0 | hello\n"
