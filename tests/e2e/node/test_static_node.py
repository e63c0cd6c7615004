"""A node as a real process must run its workers to their end, lose no output and leave no processes."""

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys

import pytest
from support.ends import KEY
from support.optional import not_none
from support.ports import free_port
from support.processes import descendants, gone
from support.repo import ROOT
from support.waiting import eventually

NODE = str(ROOT / "orchestrate" / "node")


def start_node(tmp_path, code: str, limit: int | None = None, **env: str) -> subprocess.Popen[bytes]:
    """Start a node whose only worker, rank 2, runs `code`; `limit` is the maximum file size, to imitate a full disk."""
    (tmp_path / "script.py").write_text(code)
    return subprocess.Popen(
        [sys.executable, NODE, str(tmp_path / "script.py")],
        env=os.environ | {"RANK": "2", "WORLD_SIZE": "4", "JOB_DIR": str(tmp_path)} | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        preexec_fn=None if limit is None else lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, 1000)),
    )


def log(tmp_path) -> bytes:
    path = tmp_path / "logs" / "rank-2.log"
    return path.read_bytes() if path.exists() else b""


def test_output_must_be_kept_byte_by_byte_and_tagged_by_line(tmp_path):
    code = r"import sys; sys.stdout.buffer.write(b'one\n\xff\x00 two\rthree\nno newline')"
    output, _ = start_node(tmp_path, code).communicate(timeout=150)
    assert log(tmp_path) == b"one\n\xff\x00 two\rthree\nno newline"
    assert output == b"[rank 2] one\n[rank 2] \xff\x00 two\rthree\n[rank 2] no newline\n"


def test_stderr_and_stdout_must_be_logged_in_order(tmp_path):
    code = "import sys\nfor i in range(100): print(i, file=[sys.stdout, sys.stderr][i % 2])"
    start_node(tmp_path, code).communicate(timeout=150)
    assert log(tmp_path).split() == [str(i).encode() for i in range(100)]


def test_a_flood_of_output_must_arrive_complete(tmp_path):
    output, _ = start_node(tmp_path, "for i in range(200_000): print(i)").communicate(timeout=150)
    expected = [str(i).encode() for i in range(200_000)]
    assert log(tmp_path).split() == expected
    assert [line.removeprefix(b"[rank 2] ") for line in output.splitlines()] == expected


def test_a_line_of_several_megabytes_must_arrive_complete(tmp_path):
    output, _ = start_node(tmp_path, "print('x' * 3_500_000)").communicate(timeout=150)
    assert log(tmp_path) == b"x" * 3_500_000 + b"\n"
    assert output.count(b"x") == 3_500_000 and output.count(b"[rank 2] ") > 1  # it is not held back until its end


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
def test_the_exit_code_of_a_node_must_be_its_workers(tmp_path, code, expected):
    node = start_node(tmp_path, code)
    node.communicate(timeout=150)
    assert node.returncode == expected


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_must_reach_the_script_which_may_choose_its_exit_code(tmp_path, number):
    code = "import signal, sys\nsignal.signal(15, lambda *_: sys.exit(7))\nprint('ready')\nsignal.pause()"
    node = start_node(tmp_path, code)
    eventually(lambda: b"ready" in log(tmp_path))
    node.send_signal(number)
    node.communicate(timeout=150)
    assert node.returncode == 7


def test_sigterm_must_reach_only_the_script_and_not_its_child_processes(tmp_path):
    code = (
        "import os, signal\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, {15, 23})\n"
        "if not (pid := os.fork()):\n"
        "    os._exit(signal.sigwait({15, 23}))\n"
        "print('ready')\n"
        "signal.sigwait({15})\n"
        "os.kill(pid, 23)\n"
        "os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
    )
    node = start_node(tmp_path, code)
    eventually(lambda: b"ready" in log(tmp_path))
    node.send_signal(signal.SIGTERM)
    node.communicate(timeout=150)
    assert node.returncode == 23


def test_a_script_that_ignores_sigterm_must_be_killed_after_the_grace_period(tmp_path):
    code = "import signal\nsignal.signal(15, signal.SIG_IGN)\nprint('ready')\nwhile True: signal.pause()"
    node = start_node(tmp_path, code, NODE_GRACE="0.2")
    eventually(lambda: b"ready" in log(tmp_path))
    node.send_signal(signal.SIGTERM)
    node.communicate(timeout=150)
    assert node.returncode == 137


def test_a_node_must_wait_for_its_workers_with_a_grace_period_of_a_month(tmp_path):
    code = (
        "import signal, time\nstops = []\nsignal.signal(15, lambda *_: (print('stopping'), stops.append(True)))\n"
        "print('ready')\nwhile len(stops) < 2: time.sleep(0.01)\nprint('saved')"
    )
    node = start_node(tmp_path, code, NODE_GRACE="2592000")
    eventually(lambda: b"ready\n" in log(tmp_path))
    node.send_signal(signal.SIGTERM)
    eventually(lambda: b"stopping\n" in log(tmp_path))
    os.kill(descendants(node.pid)[0], signal.SIGTERM)
    output, _ = node.communicate(timeout=150)
    assert (node.returncode, log(tmp_path)) == (0, b"ready\nstopping\nstopping\nsaved\n"), output


@pytest.mark.parametrize("mode", ["given", "join", "wait"])
@pytest.mark.parametrize("grace", ["30s", "-1", "nan", "inf", "\udcff"])
def test_an_invalid_grace_period_must_be_reported_before_anything_starts(tmp_path, mode, grace):
    settings = {"NODE_MODE": mode, "NODE_SOCKET": str(tmp_path / "s"), "NODE_KEY": KEY.hex()}
    node = start_node(tmp_path, "print('ran')", NODE_GRACE=grace, **settings)
    output, _ = node.communicate(timeout=150)
    assert node.returncode == 2
    value = ascii(grace).encode()
    assert output == b"[node] error: NODE_GRACE must be a number of seconds, not " + value + b"\n"


def test_a_second_sigterm_must_kill_immediately(tmp_path):
    code = "import signal\nsignal.signal(15, lambda *_: print('stopping'))\nprint('ready')\nwhile True: signal.pause()"
    node = start_node(tmp_path, code, NODE_GRACE="1000")
    eventually(lambda: b"ready" in log(tmp_path))
    node.send_signal(signal.SIGTERM)
    eventually(lambda: b"stopping" in log(tmp_path))
    node.send_signal(signal.SIGTERM)
    node.communicate(timeout=150)
    assert node.returncode == 137


def test_repeated_requests_of_a_scheduler_must_not_cut_the_grace_period_short(tmp_path):
    code = (
        "import signal\nsignal.signal(15, lambda *_: print('stopping'))\nprint('ready')\nsignal.pause()\nprint('saved')"
    )
    node = start_node(tmp_path, code.replace("signal.pause()", "signal.pause(); signal.pause()"), NODE_PATIENT="1")
    eventually(lambda: b"ready\n" in log(tmp_path))
    node.send_signal(signal.SIGTERM)
    eventually(lambda: b"stopping\n" in log(tmp_path))
    for _ in range(3):
        node.send_signal(signal.SIGTERM)
    os.kill(descendants(node.pid)[0], signal.SIGTERM)  # the worker ends, as it does once it has saved
    node.communicate(timeout=150)
    assert log(tmp_path) == b"ready\nstopping\nstopping\nsaved\n"


def test_processes_left_by_a_worker_must_be_killed(tmp_path):
    code = "import subprocess\nprint(subprocess.Popen(['sleep', '1000']).pid)"
    start_node(tmp_path, code).communicate(timeout=150)
    pid = int(log(tmp_path))
    eventually(lambda: gone(pid))


def test_a_failed_write_to_the_log_must_not_end_the_training(tmp_path):
    node = start_node(tmp_path, "print('a'); print('b')", limit=0)
    output, _ = node.communicate(timeout=150)
    assert node.returncode == 0
    assert output.count(b"rank 2: the log file cannot be written: [Errno 27] File too large") == 1
    assert output.count(b"[rank 2] ") == 2


@pytest.mark.parametrize("name", ["logs", "logs/rank-2.log"])
@pytest.mark.parametrize("kind", ["fifo", "read fifo", "socket", "device", "file", "folder", "loop", "closed folder"])
def test_a_file_that_a_worker_put_in_place_of_its_log_must_be_left_alone(tmp_path, name, kind):
    outside, path = tmp_path / "outside", tmp_path / name
    outside.mkdir()
    (outside / "rank-2.log").write_text("mine")
    path.parent.mkdir(exist_ok=True)
    with contextlib.ExitStack() as stack:
        if "fifo" in kind:
            os.mkfifo(path)
            if kind == "read fifo":  # so that it could be opened for writing
                stack.callback(os.close, os.open(path, os.O_RDWR))
        elif kind == "socket":
            stack.enter_context(socket.socket(socket.AF_UNIX)).bind(str(path))
        elif kind == "closed folder":
            (tmp_path / "closed").mkdir(mode=0)
            path.symlink_to(tmp_path / "closed")
        else:
            path.symlink_to({"device": "/dev/full", "loop": path, "folder": outside}.get(kind, outside / "rank-2.log"))
        node = start_node(tmp_path, "print('ran')")
        output, _ = node.communicate(timeout=60)
    assert node.returncode == 0
    assert b"[node] rank 2: no log file: " in output and b"[rank 2] ran\n" in output
    assert {path.name: path.read_text() for path in outside.iterdir()} == {"rank-2.log": "mine"}


def test_a_log_must_be_written_without_a_checkpoint_folder(tmp_path):
    (tmp_path / "checkpoints").symlink_to("nowhere")
    start_node(tmp_path, "print('ran')").communicate(timeout=60)
    assert log(tmp_path) == b"ran\n"


def test_a_log_that_cannot_be_created_must_not_keep_a_worker_from_running(tmp_path):
    (tmp_path / "logs").touch()
    node = start_node(tmp_path, "print('ran')")
    output, _ = node.communicate(timeout=150)
    assert node.returncode == 0
    assert b"[node] rank 2: no log file: " in output and b"[rank 2] ran\n" in output


def test_a_pipe_in_place_of_the_standard_input_must_not_block_a_node(tmp_path):
    os.mkfifo(tmp_path / "input")
    node = start_node(tmp_path, "import sys\nprint([sys.stdin.read()])", WORKER_STDIN=str(tmp_path / "input"))
    try:
        node.communicate(timeout=60)
    finally:
        node.kill()
    assert log(tmp_path) == b"['']\n"


def test_a_worker_must_run_without_a_job_folder(tmp_path):
    (tmp_path / "script.py").write_text("print('ran')")
    env = {name: value for name, value in os.environ.items() if name != "JOB_DIR"} | {"RANK": "0"}
    command = [sys.executable, NODE, str(tmp_path / "script.py")]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, timeout=150)
    assert (done.returncode, done.stdout) == (0, b"[rank 0] ran\n")
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"half", b"half\n[node] generation 1\nran\n"),
        (b"whole\n", b"whole\n[node] generation 1\nran\n"),
        (b"", b"[node] generation 1\nran\n"),
    ],
)
def test_a_later_generation_must_start_on_a_new_line(tmp_path, before, after):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-2.log").write_bytes(before)
    start_node(tmp_path, "print('ran')", TORCHELASTIC_RESTART_COUNT="1").communicate(timeout=150)
    assert log(tmp_path) == after


def test_a_node_without_a_command_must_train_the_app(tmp_path):
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__init__.py").touch()
    (tmp_path / "app" / "train.py").write_text("import sys\nprint(__name__, sys.argv[1:])")
    env = os.environ | {"RANK": "0", "JOB_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, NODE], env=env, cwd=tmp_path, capture_output=True, timeout=150)
    assert done.stdout == b"[rank 0] __main__ []\n"


def run_static_node(tmp_path, code: str, **env: str) -> subprocess.CompletedProcess[bytes]:
    """Run a node with two workers, whose rank another program has assigned, to its end."""
    (tmp_path / "script.py").write_text(code)
    settings = {"NODE_MODE": "static", "NODE_RANK": "0", "NNODES": "1", "NODE_NPROC": "2", "MASTER_ADDR": "127.0.0.1"}
    settings |= {"CUDA_VISIBLE_DEVICES": "", "JOB_DIR": str(tmp_path), "NODE_FAILED": str(tmp_path / "failed")}
    settings["MASTER_PORT"] = str(free_port())
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "PET_"))}
    command = [sys.executable, NODE, str(tmp_path / "script.py")]
    return subprocess.run(command, env=clean | settings | env, capture_output=True, timeout=150)


def test_a_node_must_run_the_given_number_of_workers(tmp_path):
    done = run_static_node(tmp_path, "import os\nprint(os.environ['RANK'], os.environ['NODE_MODE'])")
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == [b"[rank 0] 0 static", b"[rank 1] 1 static"]
    assert not (tmp_path / "failed").exists()


def test_a_failed_worker_must_stop_the_others_and_set_the_nodes_exit_code(tmp_path):
    done = run_static_node(
        tmp_path,
        "import os, signal, sys, time\n"
        "if os.environ['RANK'] == '0':\n"
        "    signal.signal(15, lambda *_: sys.exit(9))\n"
        "    open(os.environ['JOB_DIR'] + '/ready', 'w').close()\n"
        "    signal.pause()\n"
        "while not os.path.exists(os.environ['JOB_DIR'] + '/ready'): time.sleep(0.01)\n"
        "sys.exit(3)\n",
    )
    assert done.returncode == 3 and (tmp_path / "failed").read_text() == "3"
    assert b"[node] rank 1 failed with exit code 3\n" in done.stdout and done.stdout.count(b"failed") == 1


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"MASTER_ADDR": ""}, b"MASTER_ADDR is not set"),
        ({"CUDA_VISIBLE_DEVICES": "GPU-a"}, b"error: 2 workers on one machine need as many GPUs; it has 1"),
    ],
)
def test_a_node_that_cannot_plan_its_workers_must_report_why(tmp_path, env, message):
    done = run_static_node(tmp_path, "print('ran')", **env)
    assert done.returncode == 2
    assert message in done.stdout and b"ran" not in done.stdout


def test_a_log_must_continue_after_a_full_disk_and_note_how_much_is_missing(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    code = f"import os\nfifo = os.open({str(fifo)!r}, os.O_RDWR)\n"  # opening never waits for a writer
    code += "for line in ('a', 'bcd', 'fg', 'e', 'h'):\n    print(line)\n    os.read(fifo, 1)"
    node = start_node(tmp_path, code, limit=2)  # bytes of the log

    def wait_for(line: bytes) -> None:
        while not_none(node.stdout).readline() != b"[rank 2] " + line + b"\n":
            assert node.poll() is None

    for line in (b"a", b"bcd", b"fg"):
        wait_for(line)
        if line == b"fg":  # now the disk has space
            resource.prlimit(node.pid, resource.RLIMIT_FSIZE, (1000, 1000))
        fifo.write_text("x")
    wait_for(b"e")
    fifo.write_text("x")
    wait_for(b"h")
    fifo.write_text("x")
    node.communicate(timeout=150)
    assert node.returncode == 0
    missing = b"\n[node] 7 bytes are missing here: the file could not be written\n"
    assert log(tmp_path) == b"a\n" + missing + b"e\nh\n"  # noted once


def test_a_reader_that_does_not_read_must_not_block_a_worker(tmp_path):
    code = "for i in range(1_500_000): print(i)\nprint('done')\nimport signal\nsignal.pause()"
    node = start_node(tmp_path, code)
    eventually(lambda: log(tmp_path).endswith(b"done\n"))  # even though stdout was not read
    node.send_signal(signal.SIGTERM)
    output, _ = node.communicate(timeout=150)
    assert [int(line) for line in log(tmp_path).split()[:-1]] == list(range(1_500_000))
    lines = output.splitlines()
    assert lines[0] == b"[rank 2] 0" and len(lines) < 1_500_000


def test_a_slow_reader_must_get_the_rest_even_if_no_new_output_follows(tmp_path):
    node = start_node(tmp_path, "for i in range(30_000): print(i)\nprint('done')\nimport signal\nsignal.pause()")
    eventually(lambda: log(tmp_path).endswith(b"done\n"))
    os.set_blocking(not_none(node.stdout).fileno(), False)
    received = bytearray()

    def read() -> bool:
        with contextlib.suppress(BlockingIOError):
            received.extend(os.read(not_none(node.stdout).fileno(), 1 << 20))
        return received.endswith(b"[rank 2] done\n")

    try:
        eventually(read)
        assert received.count(b"\n") == 30_001
    finally:
        node.kill()
        node.communicate()
