"""A node, as a real process: it must run its workers to their end, lose none of their output, and leave nothing."""

import json
import os
import signal
import subprocess
import sys

import pytest
from conftest import ROOT, eventually, gone

NODE = str(ROOT / "orchestrate" / "node")


def given(tmp_path, code: str, **env: str) -> subprocess.Popen[bytes]:
    """A node whose one worker, rank 2, runs `code`."""
    (tmp_path / "script.py").write_text(code)
    return subprocess.Popen(
        [sys.executable, NODE, str(tmp_path / "script.py")],
        env=os.environ | {"RANK": "2", "WORLD_SIZE": "4", "JOB_DIR": str(tmp_path)} | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def log(tmp_path) -> bytes:
    path = tmp_path / "logs" / "rank-2.log"
    return path.read_bytes() if path.exists() else b""


def test_output_must_be_kept_byte_by_byte_and_tagged_by_line(tmp_path):
    code = r"import sys; sys.stdout.buffer.write(b'one\n\xff\x00 two\rthree\nno newline')"
    output, _ = given(tmp_path, code).communicate(timeout=30)
    assert log(tmp_path) == b"one\n\xff\x00 two\rthree\nno newline"
    assert output == b"[rank 2] one\n[rank 2] \xff\x00 two\rthree\n[rank 2] no newline\n"


def test_stderr_must_come_in_order_with_stdout(tmp_path):
    code = "import sys\nfor i in range(100): print(i, file=[sys.stdout, sys.stderr][i % 2])"
    given(tmp_path, code).communicate(timeout=30)
    assert log(tmp_path).split() == [str(i).encode() for i in range(100)]


def test_a_flood_must_arrive_whole(tmp_path):
    output, _ = given(tmp_path, "for i in range(200_000): print(i)").communicate(timeout=60)
    expected = [str(i).encode() for i in range(200_000)]
    assert log(tmp_path).split() == expected
    assert [line.removeprefix(b"[rank 2] ") for line in output.splitlines()] == expected


def test_a_line_of_many_megabytes_must_arrive_whole(tmp_path):
    given(tmp_path, "print('x' * 5_000_000)").communicate(timeout=60)
    assert log(tmp_path) == b"x" * 5_000_000 + b"\n"


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("pass", 0),
        ("raise SystemExit(3)", 3),
        ("1/0", 1),
        ("import os; os.kill(os.getpid(), 9)", 137),
        ("import os; os.abort()", 134),
        ("syntax error", 1),
    ],
)
def test_the_exit_code_must_be_the_workers(tmp_path, code, expected):
    node = given(tmp_path, code)
    node.communicate(timeout=30)
    assert node.returncode == expected


def test_sigterm_must_reach_the_script_which_may_save_and_choose_its_code(tmp_path):
    code = "import signal, sys\nsignal.signal(15, lambda *_: sys.exit(7))\nprint('ready')\nsignal.pause()"
    node = given(tmp_path, code)
    eventually(lambda: b"ready" in log(tmp_path))
    node.send_signal(signal.SIGTERM)
    node.communicate(timeout=30)
    assert node.returncode == 7


def test_a_stubborn_script_must_be_killed_after_the_grace_period(tmp_path):
    code = "import signal\nsignal.signal(15, signal.SIG_IGN)\nprint('ready')\nwhile True: signal.pause()"
    node = given(tmp_path, code, NODE_GRACE="0.2")
    eventually(lambda: b"ready" in log(tmp_path))
    node.send_signal(signal.SIGTERM)
    node.communicate(timeout=30)
    assert node.returncode == 137


def test_a_second_sigterm_must_kill_at_once(tmp_path):
    code = "import signal\nsignal.signal(15, lambda *_: print('asked'))\nprint('ready')\nwhile True: signal.pause()"
    node = given(tmp_path, code, NODE_GRACE="1000")
    eventually(lambda: b"ready" in log(tmp_path))
    node.send_signal(signal.SIGTERM)
    eventually(lambda: b"asked" in log(tmp_path))
    node.send_signal(signal.SIGTERM)
    node.communicate(timeout=30)
    assert node.returncode == 137


def test_what_a_worker_leaves_running_must_be_ended_with_it(tmp_path):
    code = "import subprocess\nprint(subprocess.Popen(['sleep', '1000']).pid)"
    given(tmp_path, code).communicate(timeout=30)
    pid = int(log(tmp_path))
    eventually(lambda: gone(pid))


def test_a_log_that_cannot_be_written_must_not_end_the_training(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-2.log").symlink_to("/dev/full")
    node = given(tmp_path, "print('a'); print('b')")
    output, _ = node.communicate(timeout=30)
    assert node.returncode == 0
    assert b"rank 2: the log file ends here: [Errno 28] No space left on device" in output
    assert output.count(b"[rank 2] ") == 2


class Waiting:
    """A node in mode `wait`, with its stubs."""

    def __init__(self, tmp_path) -> None:
        self.folder = tmp_path
        self.env = os.environ | {"NODE_MODE": "wait", "NODE_SOCKET": str(tmp_path / "s"), "JOB_DIR": str(tmp_path)}
        self.node = subprocess.Popen([sys.executable, NODE], env=self.env, stdout=subprocess.DEVNULL)

    def worker(self, rank: int, code: str) -> subprocess.Popen[bytes]:
        script = self.folder / f"{rank}.py"
        script.write_text(code)
        command = [sys.executable, NODE, "worker", str(script), "--flag", "x y"]
        return subprocess.Popen(command, env=self.env | {"RANK": str(rank), "ONLY_HERE": "1"}, cwd=self.folder)

    def log(self, rank: int) -> str:
        path = self.folder / "logs" / f"rank-{rank}.log"
        return path.read_text() if path.exists() else ""


@pytest.fixture
def waiting(tmp_path):
    node = Waiting(tmp_path)
    yield node
    node.node.terminate()
    assert node.node.wait(timeout=30) == 0
    assert not (tmp_path / "s").exists()


def test_a_waiting_node_must_run_workers_in_the_stubs_environment(waiting):
    code = "import json, os, sys\nprint(json.dumps([os.environ['ONLY_HERE'], sys.argv[1:], os.getcwd()]))\nsys.exit(5)"
    stubs = [waiting.worker(rank, code) for rank in range(3)]  # before the node listens, perhaps
    assert [stub.wait(timeout=30) for stub in stubs] == [5, 5, 5]
    assert [json.loads(waiting.log(rank)) for rank in range(3)] == [["1", ["--flag", "x y"], str(waiting.folder)]] * 3


def test_sigusr1_must_stop_the_workers_and_leave_the_node(waiting):
    stub = waiting.worker(0, "import signal\nprint('ready')\nsignal.pause()")
    eventually(lambda: "ready" in waiting.log(0))
    waiting.node.send_signal(signal.SIGUSR1)
    assert stub.wait(timeout=30) == 143
    assert waiting.worker(1, "print('late')").wait(timeout=30) == 143  # one that was being started, too
    assert "late" not in waiting.log(1)
    assert waiting.node.poll() is None


def test_sigusr2_must_kill_the_workers_and_leave_the_node(waiting):
    stub = waiting.worker(0, "import signal\nsignal.signal(15, signal.SIG_IGN)\nprint('ready')\nsignal.pause()")
    eventually(lambda: "ready" in waiting.log(0))
    waiting.node.send_signal(signal.SIGUSR2)
    assert stub.wait(timeout=30) == 137
    assert waiting.node.poll() is None


def test_the_end_of_a_stub_must_be_the_end_of_its_worker(waiting):
    stub = waiting.worker(0, "import os, signal\nprint(os.getpid())\nsignal.pause()")
    pid = int(eventually(lambda: waiting.log(0)))
    stub.kill()
    stub.wait()
    eventually(lambda: gone(pid))


def test_the_end_of_a_node_must_be_the_end_of_its_workers(tmp_path):
    node = Waiting(tmp_path)
    stub = node.worker(0, "import os, signal\nprint(os.getpid())\nsignal.pause()")
    pid = int(eventually(lambda: node.log(0)))
    node.node.kill()
    node.node.wait()
    assert stub.wait(timeout=30) == 137
    eventually(lambda: gone(pid))
