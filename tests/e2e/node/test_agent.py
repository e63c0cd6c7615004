"""A node that waits for an orchestrator must start, stop and clean up after workers, both fresh and forked ones."""

import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest
from support.agents import PRELOAD, Pipe, Waiting
from support.processes import descendants, gone
from support.waiting import eventually

from orchestrate.node import worker
from orchestrate.node.warm import Forked


@pytest.fixture(params=["", PRELOAD], ids=["fresh", "warm"])
def patient(tmp_path, request):
    """A node whose grace period is longer than any test takes."""
    node = Waiting(tmp_path, request.param, NODE_GRACE="1000")
    yield node
    node.end()


def test_a_node_must_run_workers_in_the_environment_it_is_sent(waiting):
    code = "import json, os, sys\nprint(json.dumps([os.environ['ONLY_HERE'], sys.argv[1:], os.getcwd()]))\nsys.exit(5)"
    for rank in range(3):
        waiting.start(rank, code)
    assert [waiting.code(rank) for rank in range(3)] == [5, 5, 5]
    assert [json.loads(waiting.log(rank)) for rank in range(3)] == [["1", ["--flag", "x y"], str(waiting.folder)]] * 3


def test_a_worker_with_its_own_environment_must_inherit_nothing_from_the_node(waiting):
    (waiting.folder / "0.py").write_text("import os\nprint('NODE_MODE' in os.environ, os.getcwd())")
    env = {key: os.environ[key] for key in ("PATH", "PYTHONPATH") if key in os.environ}
    env |= {"RANK": "0", "JOB_DIR": str(waiting.folder)}
    waiting.pipe.ask("start", command=[str(waiting.folder / "0.py")], env=env, inherit=False, cwd="/")
    assert waiting.code(0) == 0
    assert waiting.log(0) == "False /\n"


def test_a_node_must_stop_its_workers_on_request_and_keep_running(waiting):
    waiting.start(0, "import signal\nprint('ready')\nsignal.pause()")
    eventually(lambda: "ready\n" in waiting.log(0))
    waiting.pipe.ask("stop", kill=False)
    assert waiting.code(0) == 143
    assert waiting.run(0, "print('again')", generation=1) == 0
    assert waiting.log(0) == "ready\n[node] generation 1\nagain\n"


def test_a_node_must_report_whether_it_had_asked_a_worker_to_stop(waiting):
    for rank in range(2):
        waiting.start(rank, "import os, signal\nprint(os.getpid())\nsignal.pause()")
    pids = [int(eventually(lambda rank=rank: waiting.log(rank))) for rank in range(2)]
    os.kill(pids[0], signal.SIGTERM)
    assert waiting.pipe.until("ended", rank=0) | {"code": 143, "stopping": False} == waiting.pipe.until("ended", rank=0)
    waiting.pipe.ask("stop", kill=False)
    assert waiting.pipe.until("ended", rank=1) | {"code": 143, "stopping": True} == waiting.pipe.until("ended", rank=1)


def test_a_worker_that_ended_before_the_stop_request_must_be_reported_as_not_asked(waiting):
    waiting.start(0, "import os, signal\nprint(os.getpid())\nsignal.pause()")
    pid = int(eventually(lambda: waiting.log(0)))
    waiting.node.send_signal(signal.SIGSTOP)  # so that it notices both at once
    os.kill(pid, signal.SIGTERM)
    eventually(lambda: gone(pid))
    waiting.pipe.ask("stop", kill=False)
    waiting.node.send_signal(signal.SIGCONT)
    ended = waiting.pipe.until("ended", rank=0)
    assert (ended["code"], ended["stopping"]) == (143, False)


def test_a_worker_of_an_ended_generation_must_not_start(waiting):
    (waiting.folder / "generation").write_text("2")
    assert waiting.run(0, "print('late')", generation=1) == 143
    assert waiting.log(0) == ""
    assert waiting.run(0, "print('right')", generation=2) == 0
    (waiting.folder / "generation").write_text("2 over\n")
    assert waiting.run(1, "print('late')", generation=2) == 143


def test_a_worker_of_a_newer_generation_must_end_workers_of_older_ones(waiting):
    code = "import os, signal\nsignal.signal(15, signal.SIG_IGN)\nprint(os.getpid())\nsignal.pause()"
    waiting.start(0, code)
    pid = int(eventually(lambda: waiting.log(0)))
    assert waiting.run(1, "print('new')", generation=1) == 0
    eventually(lambda: gone(pid))
    assert waiting.status() == {"generation": 1, "codes": {"1": 0}, "hints": {"1": ""}, "running": {}}
    assert waiting.run(2, "print('older')") == 143


def test_a_node_must_kill_its_workers_on_request_and_keep_running(patient):
    waiting = patient
    waiting.start(0, "import signal\nsignal.signal(15, signal.SIG_IGN)\nprint('ready')\nsignal.pause()")
    eventually(lambda: "ready\n" in waiting.log(0))
    waiting.pipe.ask("stop", kill=True)
    assert waiting.code(0) == 137
    assert waiting.node.poll() is None


def test_a_worker_must_outlive_its_client_and_the_next_client_must_get_its_exit_code(waiting):
    code = "import os, signal, sys\nsignal.signal(15, lambda *_: sys.exit(9))\nprint(os.getpid())\nsignal.pause()"
    waiting.start(0, code)
    assert waiting.pipe.until("started", rank=0, generation=0)
    pid = int(eventually(lambda: waiting.log(0)))
    waiting.pipe.process.kill()
    waiting.pipe.close(-signal.SIGKILL)
    waiting.pipe = Pipe(waiting.env)
    status = waiting.status()
    assert (status["generation"], status["codes"], status["running"]["0"]["pid"]) == (0, {}, pid)
    assert status["running"]["0"]["state"] in "RSD" and status["running"]["0"]["cpu"] >= 0
    waiting.pipe.ask("stop", kill=False)
    assert waiting.code(0) == 9
    another = Pipe(waiting.env)
    # Also after the worker has ended.
    assert another.status() == {"generation": 0, "codes": {"0": 9}, "hints": {"0": ""}, "running": {}}
    another.close()


@pytest.mark.parametrize("frozen", [False, True])
def test_a_hung_worker_must_print_its_stack_and_abort(waiting, frozen):
    code = "import os, signal\n\ndef waits_here():\n    print(os.getpid(), 'ready')\n    signal.pause()\n\nwaits_here()"
    for rank in range(2):
        waiting.start(rank, code)
        eventually(lambda rank=rank: "ready\n" in waiting.log(rank))
    if frozen:
        waiting.pipe.ask("freeze")
        pids = [waiting.log(rank).split()[0] for rank in range(2)]
        eventually(
            lambda: all(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T" for pid in pids)
        )
    waiting.pipe.ask("dump")
    assert [waiting.code(rank) for rank in range(2)] == [134, 134]
    for rank in range(2):
        assert f'/{rank}.py", line 5 in waits_here' in waiting.log(rank)


def test_orphans_of_workers_must_be_reaped_while_the_workers_run(waiting):
    waiting.start(
        0,
        "import os, signal, subprocess, time\n"
        "pid = subprocess.run(['sh', '-c', 'true & echo $!'], capture_output=True, text=True).stdout.strip()\n"
        "print(pid)\n"
        "signal.pause()\n",
    )
    pid = eventually(lambda: waiting.log(0).strip())
    eventually(lambda: not Path(f"/proc/{pid}").exists())
    assert waiting.status()["running"].keys() == {"0"}


def test_a_worker_that_cannot_be_started_must_be_reported_as_ended(tmp_path):
    node = Waiting(tmp_path)
    (tmp_path / "0.py").write_text("print('started')")
    env = {"RANK": "0", "JOB_DIR": str(tmp_path)}
    node.pipe.ask("start", command=["0.py"], env=env, inherit=True, cwd=str(tmp_path / "gone"))
    assert node.code(0) == 126
    assert node.log(0) == f"[node] rank 0 did not start: No such file or directory: {tmp_path / 'gone'}\n"
    node.end()


def test_cpu_time_and_memory_of_a_worker_must_include_its_child_processes(waiting):
    burn = "while time.process_time() < 0.3: pass\nprint('burnt', open('/proc/self/statm').read().split()[1])\n"
    burn += "signal.pause()"
    waiting.start(0, f"import os, signal, time\nos.fork()\n{burn}")
    eventually(lambda: waiting.log(0).count("burnt") == 2)
    eventually(lambda: waiting.status()["running"]["0"]["state"] == "S")
    running = waiting.status()["running"]["0"]
    pages = sum(map(int, re.findall("burnt ([0-9]+)", waiting.log(0))))
    assert 0.55 < running["cpu"] < 10 and running["memory"] > 0.8 * pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("preload", ["", PRELOAD], ids=["fresh", "warm"])
def test_workers_and_zygote_must_end_with_their_node(tmp_path, preload):
    node = Waiting(tmp_path, preload)
    node.start(0, "import os, signal\nprint(os.getpid())\nsignal.pause()")
    pid = int(eventually(lambda: node.log(0)))
    pids = {pid, *descendants(node.node.pid)}
    assert len(pids) == (2 if preload else 1)
    node.node.kill()
    node.node.wait()
    assert node.code(0) is None
    node.pipe.close()
    eventually(lambda: all(map(gone, pids)))


def test_a_zygote_that_is_still_importing_must_not_outlive_its_node(tmp_path):
    (tmp_path / "slow.py").write_text("import signal\nopen('importing', 'w').close()\nsignal.pause()")
    node = Waiting(tmp_path, "slow")
    eventually(lambda: (tmp_path / "importing").exists())
    (importing,) = descendants(node.node.pid)
    node.node.kill()
    node.node.wait()
    node.pipe.close()
    eventually(lambda: gone(importing))


FORKS = (
    "import os, signal\nsignal.signal(15, signal.SIG_IGN)\npid = os.fork()\nwhile not pid: signal.pause()\nprint(pid)\n"
)


@pytest.mark.parametrize(
    ("end", "code"), [("", 0), ("os._exit(3)", 3), ("os.kill(os.getpid(), 9)", 137), ("signal.pause()", 137)]
)
def test_processes_forked_by_a_worker_must_end_with_it(patient, end, code):
    patient.start(0, FORKS + end)
    pid = int(eventually(lambda: patient.log(0)))
    if "pause" in end:
        patient.pipe.ask("stop", kill=True)
    assert patient.code(0) == code
    eventually(lambda: gone(pid))


def test_the_grace_period_of_a_generation_must_not_end_the_next_one(tmp_path):
    node = Waiting(tmp_path, NODE_GRACE="0.5")
    node.start(0, "import signal\nprint('ready')\nsignal.pause()")
    eventually(lambda: node.log(0))
    node.pipe.ask("stop", kill=False)
    assert node.code(0) == 143
    assert node.run(1, "import time\ntime.sleep(1)", generation=1) == 0  # longer than the grace period
    node.end()


def test_a_process_in_its_own_session_and_its_children_must_end_with_the_node(waiting):
    inner = "import signal, subprocess\nprint(subprocess.Popen(['sleep', '1000']).pid, flush=True)\nsignal.pause()"
    own_session = f"subprocess.Popen([sys.executable, '-c', {inner!r}], start_new_session=True, stdout=-1)"
    assert waiting.run(0, f"import subprocess, sys\np = {own_session}\nprint(p.pid, int(p.stdout.readline()))") == 0
    pids = [int(pid) for pid in waiting.log(0).split()]
    assert len(pids) == 2 and not any(map(gone, pids))
    waiting.node.terminate()
    waiting.node.wait(timeout=150)
    assert all(map(gone, pids))


def test_a_process_that_left_its_workers_session_must_end_with_the_node(waiting):
    code = "import subprocess\nprint(subprocess.Popen(['sleep', '1000'], start_new_session=True).pid)"
    assert waiting.run(0, code) == 0
    pid = int(waiting.log(0))
    assert not gone(pid)
    waiting.node.terminate()
    waiting.node.wait(timeout=150)
    assert gone(pid)


def test_a_worker_that_is_exiting_at_the_stop_request_must_not_count_as_asked(tmp_path):
    before = (
        "real = worker.Worker.exiting.fget; "
        "worker.Worker.exiting = property(lambda self: self.rank == '1' or real(self))"
    )
    node = Waiting(tmp_path, before=before)
    for rank in range(2):
        node.start(rank, "import signal\nprint('ready')\nsignal.pause()")
        eventually(lambda rank=rank: "ready" in node.log(rank))
    node.pipe.ask("stop", kill=False)
    assert node.pipe.until("ended", rank=0)["stopping"]
    os.kill(node.pipe.until("started", rank=1)["pid"], signal.SIGTERM)
    assert not node.pipe.until("ended", rank=1)["stopping"]
    node.end()


def test_a_process_must_count_as_exiting_once_the_kernel_closes_its_files():
    instance = worker.Worker([], {"RANK": "0"}, None, lambda code: None)
    pid = os.fork()
    if not pid:
        signal.pause()
    instance.process = Forked(pid)
    assert not instance.exiting
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert instance.exiting
    assert instance.poll() == 137 and not instance.exiting
    for end in (instance.output, instance.input):
        os.close(end)


def test_variables_in_a_command_must_be_replaced_with_the_workers_own_values(waiting):
    (waiting.folder / "0.py").write_text("import sys\nprint(sys.argv[1:])")
    arguments = ["--out=$JOB_DIR/x", "${RANK} of $WORLD_SIZE", "$RANKED $HOME $NONE $$ $ ${", "${RANK", "$NODE_MODE"]
    script = str(waiting.folder / "0.py")
    waiting.command(0, script, *arguments, WORLD_SIZE="4")
    waiting.command(1, script, *arguments, WORLD_SIZE="4", WORKER_EXPAND="false")
    assert [waiting.code(rank) for rank in range(2)] == [0, 0]
    own = [f"--out={waiting.folder}/x", "0 of 4", *arguments[2:]]
    assert [waiting.log(rank) for rank in range(2)] == [f"{own}\n", f"{arguments}\n"]


def test_any_program_must_run_as_a_worker(waiting):
    go = waiting.folder / "go"
    go.write_text('#!/bin/sh\necho "rank $RANK: $@" here; exit $RANK\n')
    go.chmod(0o755)
    waiting.command(0, "sh", "-c", 'echo "$0 $RANK"; exit 3', "$RANK")
    waiting.command(1, str(go), "a b")
    waiting.command(2, "./go", "a b")
    assert [waiting.code(rank) for rank in range(3)] == [3, 1, 2]
    assert [waiting.log(rank) for rank in range(3)] == ["0 0\n", "rank 1: a b here\n", "rank 2: a b here\n"]


@pytest.mark.parametrize(
    "program, code, why", [("nonesuch", 127, "No such file"), ("./0.txt", 126, "Permission denied")]
)
def test_the_log_must_say_why_a_program_did_not_start(waiting, program, code, why):
    (waiting.folder / "0.txt").write_text("text")
    waiting.command(0, program)
    assert waiting.code(0) == code
    assert waiting.log(0).startswith(f"[node] rank 0 did not start: {why}") and program in waiting.log(0)


def test_a_node_must_report_that_it_is_still_importing(tmp_path):
    (tmp_path / "slow.py").write_text("import os, time\nwhile not os.path.exists('go'): time.sleep(0.01)\n")
    node = Waiting(tmp_path, "slow", PYTHONPATH="")

    def importing() -> bool:
        node.pipe.heard.clear()
        node.pipe.ask("status")
        return node.pipe.until("status")["importing"]

    assert importing()
    (tmp_path / "go").touch()
    eventually(lambda: not importing())
    node.end()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has subreapers")
def test_what_workers_have_left_running_must_be_killed_on_request(waiting):
    left = "import os, signal\nready, tell = os.pipe()\nif pid := os.fork():\n    os.read(ready, 1)\n    print(pid)\n"
    left += "else:\n    os.setsid()\n    os.write(tell, b'.')\n    signal.pause()"
    waiting.start(0, left)
    pid = int(eventually(lambda: waiting.log(0)))
    assert waiting.code(0) == 0
    waiting.pipe.ask("stop", kill=True)
    waiting.pipe.ask("status")
    waiting.pipe.until("status")
    assert not gone(pid)
    waiting.pipe.ask("stop", kill=True, leftovers=True)
    eventually(lambda: gone(pid))


def test_a_worker_whose_main_thread_has_ended_must_be_killed_after_the_grace_period(tmp_path):
    node = Waiting(tmp_path, NODE_GRACE="0.1")
    goes_on = (
        "import ctypes, signal, threading\nthreading.Thread(target=signal.pause).start()\nprint('there', flush=True)\n"
    )
    node.start(0, goes_on + "ctypes.CDLL(None).pthread_exit(None)")
    eventually(lambda: node.status()["running"]["0"]["state"] == "Z")
    node.pipe.ask("stop", kill=False)
    assert node.code(0) == 137
    node.end()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has prlimit(2)")
def test_a_node_whose_limit_of_descriptors_was_changed_must_still_answer(waiting):
    limit = f"import resource\nresource.prlimit({waiting.node.pid}, resource.RLIMIT_NOFILE, (0, 4096))"
    assert waiting.run(0, limit) == 0
    assert waiting.status()["codes"] == {"0": 0}
    assert waiting.run(1, "print('again')") == 0


TRACER = """
import ctypes, os, signal
worker, (ready, tell) = os.getpid(), os.pipe()
if not os.fork():
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    assert ctypes.CDLL(None).ptrace(0x4206, worker, 0, 0) == 0  # PTRACE_SEIZE
    os.write(tell, b".")
    while True:
        signal.pause()
os.read(ready, 1)
memory = b"x" * (1 << 28)  # takes a moment to free, and until then the tracer is the worker's child
print("traced", flush=True)
signal.pause()
"""


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="needs the right to trace")
def test_a_traced_worker_must_not_keep_a_node_from_being_cleaned(waiting):
    waiting.start(0, TRACER)
    eventually(lambda: waiting.log(0))
    waiting.pipe.ask("clean")
    assert waiting.pipe.until("cleaned")
