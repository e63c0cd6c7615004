"""Python's debugger in a worker of a running job."""

import os
import re
import signal
import socket
import subprocess
import sys

import pytest
from support.optional import not_none
from support.waiting import eventually

from orchestrate.node.programs import debugger

LOOP = """
import os, pathlib, time

def load(n):
    time.sleep(0.05)
    return n * 2

print("pid", os.getpid(), flush=True)
finish, n = pathlib.Path(os.environ["JOB_DIR"], "finish"), 0
while not finish.exists():
    n += 1
    doubled = load(n)
    print("step", n, doubled, flush=True)
"""
STOPS = """
import os

def load(n):
    if n == 2 and os.environ["RANK"] == "1":
        breakpoint()
    return n * 2

for n in range(4):
    print("step", n, load(n), flush=True)
"""
BUSY = """
import hashlib

print("begins", flush=True)
hashlib.pbkdf2_hmac("sha256", b"", b"", 1 << 30)  # not interrupted by a signal
"""
WARM = ("--set", "preload=[colorsys]")  # so that workers are forked
FIRST = r"^> \S+loop\.py\(\d+\)\w+\(\)\n-> "


class Debugger:
    """`orchestrate debug`, with a pipe as its input and output, or a terminal that ends with the process."""

    def __init__(self, cli, *options: str, terminal: bool = False) -> None:
        env = cli.env | {"PYTHONUNBUFFERED": "1"}
        command = [sys.executable, "-m", "orchestrate", "debug", *options]
        if terminal:
            command = [sys.executable, "-c", "import pty, sys; pty.spawn(sys.argv[1:])", *command]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, cwd=cli.folder, env=env, stdin=pipe, stdout=pipe, stderr=pipe)
        self.said = ""

    def ask(self, *commands: str) -> str:
        """Give commands, and return what it says until its next prompt."""
        for command in commands:
            not_none(self.process.stdin).write(f"{command}\n".encode())
            not_none(self.process.stdin).flush()
            self.prompt()
        return self.said

    def prompt(self) -> str:
        self.said = ""
        while not self.said.endswith("(Pdb) "):
            text = os.read(not_none(self.process.stdout).fileno(), 1 << 16)
            assert text, self.said + self.process.communicate()[1].decode()
            self.said += text.decode()
        return self.said

    def end(self, command: str = "") -> tuple[int, str]:
        """Leave it by a command, or by the end of its input; return its exit code and messages."""
        _, err = self.process.communicate(f"{command}\n".encode() if command else b"", timeout=60)
        return self.process.returncode, err.decode()


@pytest.fixture
def job(cli, engine):
    """A job of two ranks that runs until `cli.finish_jobs()`; it must succeed."""
    (cli.folder / "loop.py").write_text(LOOP)
    options = ["--engine", engine, "--gpus", "none", "--trainers", "1", *WARM]
    process = cli.start("run", *options, "--", "loop.py")
    cli.wait_for("step 3 ", 1)
    yield process
    cli.finish_jobs()
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err


def steps(cli, rank: int) -> int:
    return cli.log(rank).count("step ")


@pytest.mark.each_engine
def test_a_rank_must_stop_where_it_is_and_go_on_when_the_debugger_is_left(cli, job):
    one = Debugger(cli, "--rank", "1")
    assert re.match(FIRST, one.prompt(), re.M)
    before = steps(cli, 1)
    assert "loop.py(" in one.ask("w") and "zygote" not in one.said
    assert int(one.ask("p n").split()[0]) == before + 1  # in `load`, or just before or after it
    assert "return n * 2" in one.ask("b load", "c", "n")
    assert steps(cli, 1) - before <= 1
    others = steps(cli, 0)
    eventually(lambda: steps(cli, 0) > others + 5)  # they go on until they wait for this one
    code, err = one.end("q")
    assert code == 0 and "rank 1 stops; the others wait for it in their collectives" in err
    eventually(lambda: steps(cli, 1) > before + 5)
    pid = not_none(re.search(r"pid (\d+)", cli.log(1)))[1]  # other tests debug workers at the same time
    assert not [name for name in os.listdir("/tmp") if re.fullmatch(rf"orchestrate-debug-\d+-{pid}", name)]


@pytest.mark.any_engine
@pytest.mark.parametrize("how", ["end of input", "interrupt", "killed", "continue"])
def test_a_rank_must_go_on_however_the_debugger_ends(cli, job, how):
    one = Debugger(cli, "--rank", "0")
    one.prompt()
    before = steps(cli, 0)
    if how == "killed":
        one.ask("b load")  # which it does not stop at anymore
        one.process.kill()
        one.end()
    elif how == "interrupt":
        one.process.send_signal(signal.SIGINT)
        one.end()
    else:
        assert one.end("c" if how == "continue" else "")[0] == 0
    eventually(lambda: steps(cli, 0) > before + 5)
    again = Debugger(cli, "--rank", "0")
    again.prompt()
    assert again.end("q")[0] == 0


@pytest.mark.each_engine
def test_a_rank_must_go_on_if_the_terminal_of_its_debugger_is_closed(cli, job):
    one = Debugger(cli, "--rank", "0", terminal=True)
    one.prompt()
    one.ask("b load")
    before = steps(cli, 0)
    one.process.kill()
    one.process.communicate()
    eventually(lambda: steps(cli, 0) > before + 5)


def test_a_second_debugger_must_not_take_the_place_of_one_that_waits(cli):
    (cli.folder / "busy.py").write_text(BUSY)
    process = cli.start("run", "--engine", "process", "--gpus", "none", "--trainers", "0", *WARM, "--", "busy.py")
    cli.wait_for("begins", 0)
    first = Debugger(cli)
    for line in not_none(first.process.stderr):
        if b"in a call of a library" in line:
            break
    second = cli("debug")
    assert (second.returncode, second.stderr.splitlines()[-1]) == (1, "rank 0 is being debugged")
    assert first.end()[0] == 0  # by the end of its input, although the worker has not answered
    assert cli("stop", cli.run_dir().name).returncode == 0
    process.communicate(timeout=60)


@pytest.mark.any_engine
def test_breakpoint_must_wait_for_the_debugger(cli, engine):
    (cli.folder / "stops.py").write_text(STOPS)
    options = ["--engine", engine, "--gpus", "none", "--trainers", "1", *WARM]
    process = cli.start("run", *options, "--", "stops.py")
    name = eventually(lambda: re.search(r"rank 1 waits at \S+stops.py:6 for: .* debug (\S+) --rank 1", logs(cli)))[1]
    assert re.search(r"^rank 1: in a debugger at \S*stops.py:6 in", cli("stacks", name).stdout, re.M)
    one = Debugger(cli, name, "--rank", "1")
    assert "-> breakpoint()" in one.prompt() and one.ask("p n").startswith("2\n")
    assert one.end("c")[0] == 0
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0 and cli.log(1).splitlines()[-1] == "step 3 6", err


def logs(cli) -> str:
    return "".join(path.read_text() for path in cli.folder.glob("runs/*/logs/rank-1.log"))


def test_a_rank_that_cannot_be_debugged_must_be_named(cli):
    options = ["--engine", "process", "--gpus", "none", "--trainers", "0"]
    process = cli.start("run", *options, "--", "count.py", "until-asked")  # not started warm
    cli.wait_for("step 3 ", 0)
    done = cli("debug", "--rank", "0")
    assert done.returncode == 1
    assert "rank 0 cannot be debugged: it has not started, or is not a script that was started warm\n" in done.stderr
    assert "Ctrl-D" not in done.stderr
    assert (cli("debug", "--rank", "7").returncode, "there is no rank 7" in cli("debug", "--rank", "7").stderr) == (
        2,
        True,
    )
    cli.finish_jobs()
    process.communicate(timeout=60)
    done = cli("debug")
    assert done.returncode == 2 and re.match(r"error: count-\w+ has ended\n", done.stderr)


def test_a_socket_with_a_similar_name_must_not_be_taken_for_that_of_a_worker(tmp_path):
    with socket.socket(socket.AF_UNIX) as other, socket.socket(socket.AF_UNIX) as listener:
        other.bind(f"\0x {tmp_path}/debug-1")
        assert not debugger.listens(f"{tmp_path}/debug-1")
        listener.bind(f"{tmp_path}/debug-1")
        assert debugger.listens(f"{tmp_path}/debug-1")
