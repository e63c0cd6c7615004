"""The standard input of workers: empty, or that of the command line on rank 0."""

import signal
import subprocess
import sys

import pytest

CODE = """
import os, sys
print("read", repr(sys.stdin.read()))
sys.exit(os.environ["RANK"] == os.environ["TORCHELASTIC_RESTART_COUNT"] == "0")
"""


@pytest.mark.parametrize("command", [["reads.py"], ["sh", "-c", "python reads.py"]], ids=["forked", "program"])
def test_rank_0_must_read_standard_input_also_after_a_restart(cli, engine, command):
    (cli.folder / "reads.py").write_text(CODE)
    options = ["run", "--engine", engine, "--trainers", "1", "--gpus", "none", "--set", "preload=json", "--stdin"]
    done = subprocess.run(
        [sys.executable, "-m", "orchestrate", *options, *command],
        cwd=cli.folder,
        env=cli.env,
        input="a line\nand half",
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert cli.log(0).count("read 'a line\\nand half'") == 2
    assert "read ''" in cli.log(1) and "a line" not in cli.log(1)


@pytest.mark.any_engine
def test_workers_must_read_nothing_without_being_asked(cli, engine):
    (cli.folder / "reads.py").write_text(CODE)
    done = cli("run", "--engine", engine, "--trainers", "0", "--gpus", "none", "reads.py")
    assert done.returncode == 0 and cli.log(0).count("read ''") == 2, done.stderr


OPTIONS = ("run", "--engine", "process", "--trainers", "0", "--gpus", "none", "--stdin", "reads.py")


def test_ctrl_c_while_standard_input_is_read_must_leave_no_job(cli, nothing_left):
    (cli.folder / "reads.py").write_text(CODE)
    command = [sys.executable, "-m", "orchestrate", *OPTIONS]
    with subprocess.Popen(
        command,
        cwd=cli.folder,
        env=cli.env,
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:
        assert process.stdin and process.stderr
        process.stdin.write("some")
        process.stdin.flush()
        while "reading standard input" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
    assert not (cli.folder / "runs").exists()


def test_a_closed_standard_input_must_be_refused(cli, nothing_left):
    (cli.folder / "reads.py").write_text(CODE)
    command = ["sh", "-c", 'exec "$@" <&-', "sh", sys.executable, "-m", "orchestrate", *OPTIONS]
    done = subprocess.run(command, cwd=cli.folder, env=cli.env, capture_output=True, text=True)
    assert (done.returncode, "error: standard input is closed" in done.stderr) == (2, True), done.stderr
    assert not (cli.folder / "runs").exists()
