"""Output of a job that cannot be written."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.waiting import eventually


def test_output_must_never_go_to_a_file_that_reuses_a_closed_descriptor(cli, nothing_left):
    command = 'exec "$0" -m orchestrate run --engine process --trainers 0 -- hello.py <&- >&- 2>&-'
    (cli.folder / "hello.py").write_text("print('hello')\n")
    subprocess.run(["sh", "-c", command, sys.executable], cwd=cli.folder, env=cli.env, check=True, timeout=120)
    events = (cli.run_dir() / "events.jsonl").read_text()
    assert all(line.startswith("{") for line in events.splitlines())
    assert "hello" in cli.log(0) and cli.report()["outcome"] == "succeeded"


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_job_must_finish_even_if_its_output_is_full(cli, nothing_left, stream):
    (cli.folder / "hello.py").write_text("print('hello ' * 9999)\n")
    full = f"{1 if stream == 'stdout' else 2}>/dev/full"
    command = f'exec "$0" -m orchestrate run --engine process --trainers 1 -- hello.py {full}'
    done = subprocess.run(
        ["sh", "-c", command, sys.executable], cwd=cli.folder, env=cli.env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1 and cli.report()["outcome"] == "succeeded"
    if stream == "stdout":
        assert done.stderr.splitlines()[-1].startswith("error: could not write all output")


def test_signals_must_be_counted_while_a_message_is_blocked(cli, nothing_left):
    (cli.folder / "forever.py").write_text("import signal\nsignal.pause()\n")
    env = {key: value for key, value in cli.env.items() if key != "PYTHONUNBUFFERED"}
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while os.write(writer, b"." * 4096):
            pass
    os.set_blocking(writer, True)
    command = [sys.executable, "-m", "orchestrate", "run", "--engine", "process", "--trainers", "0", "--", "forever.py"]
    with subprocess.Popen(command, cwd=cli.folder, env=env, stdout=subprocess.PIPE, stderr=writer) as child:
        os.close(writer)
        stack = Path(f"/proc/{child.pid}/wchan")
        eventually(lambda: list(cli.folder.glob("runs/*/plan.json")) and "pipe" in stack.read_text())
        child.send_signal(signal.SIGTERM)
        with os.fdopen(reader, "rb") as file:
            text = file.read().decode().lstrip(".")
        assert "Traceback" not in text and "stopping: workers have" in text
        assert child.wait(timeout=60) == 130


FURTHER = """import os, pathlib, sys
state = pathlib.Path(os.environ["JOB_DIR"], "state")
step = int(state.read_text()) if state.exists() else 0
for number in range(10):
    print({"step": step + number, "loss": 0.1}, flush=True)
    print("y" * 40000, flush=True)
state.write_text(str(step + 10))
sys.exit(os.environ["TORCHELASTIC_RESTART_COUNT"] != "5")
"""


def test_output_that_is_not_read_must_not_count_as_a_job_without_progress(cli):
    (cli.folder / "further.py").write_text(FURTHER)
    options = ["--engine", "process", "--nodes", "1", "--set", "warm=false", "--max-restarts", "20"]
    with cli.start("run", *options, "further.py") as child:
        eventually(
            lambda: any("outcome_decided" in path.read_text() for path in cli.folder.glob("runs/*/events.jsonl")), 120
        )
        child.communicate(timeout=100)
    assert (child.returncode, cli.report()["outcome"]) == (0, "succeeded")
