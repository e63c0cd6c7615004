"""An agent must carry out requests, report the results, and withstand faulty clients."""

import contextlib
import json
import os
import re
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.agents import PRELOAD, Waiting, dial
from support.ends import KEY, End
from support.processes import descendants, gone
from support.tcp_node import Node
from support.waiting import eventually

from orchestrate.node import agent, worker
from orchestrate.node.messages import protocol
from orchestrate.node.warm import Forked

PAUSES = "import os, signal\nprint(os.getpid())\nsignal.pause()"
STUBBORN = "import signal\nsignal.signal(15, lambda *_: print('asked'))\nprint('ready')\nwhile True: signal.pause()"


@pytest.fixture
def waiting(tmp_path: Path) -> Iterator[Waiting]:
    node = Waiting(tmp_path)
    yield node
    node.end()


# --- connections


def test_the_socket_of_a_node_must_be_named_after_its_host_in_the_socket_folder(tmp_path):
    node = Waiting(tmp_path, NODE_SOCKETS=str(tmp_path / "nodes"))
    path = tmp_path / "nodes" / socket.gethostname()
    with dial(path) as sock:
        node_end = End(sock)
        node_end.ask("status")
        assert node_end.hear()["say"] == "status"
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700 and stat.S_IMODE(path.stat().st_mode) & 0o077 == 0
    assert node.status()["codes"] == {}
    node.end()
    assert not path.exists() and not (tmp_path / "s").exists()


def test_a_node_must_work_if_the_socket_folder_cannot_be_created(tmp_path):
    (tmp_path / "file").touch()
    node = Waiting(tmp_path, NODE_SOCKETS=str(tmp_path / "file" / "nodes"))
    assert node.run(0, "print('ran')") == 0
    node.end()


def test_a_stale_socket_must_be_replaced(tmp_path):
    with socket.socket(socket.AF_UNIX) as old:
        old.bind(str(tmp_path / "s"))
    node = Waiting(tmp_path)
    assert node.run(0, "print('ran')") == 0
    node.end()


def test_a_request_must_be_accepted_in_fragments_and_from_a_client_that_has_disconnected(waiting):
    assert waiting.status()["generation"] == -1
    requests = []
    for rank in range(2):
        (waiting.folder / f"{rank}.py").write_text("print('ran')")
        env = {"RANK": str(rank), "JOB_DIR": str(waiting.folder)}
        command = [str(waiting.folder / f"{rank}.py")]
        requests.append(json.dumps({"ask": "start", "command": command, "env": env, "inherit": True, "cwd": None}))
    with dial(waiting.folder / "s") as sock:
        end = End(sock)
        end.meet()
        text = b"".join(end.signer.sign(each.encode()) + b"\n" for each in requests)
        half = len(requests[0]) // 2
        sock.sendall(text[:half])
        assert waiting.status()["running"] == {}  # the node has read the first half
        sock.sendall(text[half:])
    assert [waiting.code(rank) for rank in range(2)] == [0, 0]


def test_a_worker_must_not_inherit_the_restrictive_umask_of_its_node(waiting):
    assert waiting.run(0, "print(open('/proc/self/status').read())") == 0
    (mask,) = re.findall(r"^Umask:.*$", Path("/proc/self/status").read_text(), re.M)
    assert mask in waiting.log(0)  # the node creates its sockets with a stricter one


def test_no_worker_must_start_if_the_expected_packet_filter_is_missing(waiting):
    (waiting.folder / "0.py").write_text("print('ran')")
    script, env = [str(waiting.folder / "0.py")], {"RANK": "0", "TORCHELASTIC_RESTART_COUNT": "3"}
    waiting.pipe.ask("start", command=script, env=env, inherit=True, cwd=None, filtered=True)
    ended = waiting.pipe.until("ended", rank=0, generation=3)
    assert (ended["code"], ended["hint"], ended["stopping"]) == (143, "ending", False)
    assert waiting.log(0) == "" and waiting.status()["generation"] == -1
    waiting.pipe.heard.clear()
    waiting.pipe.ask("start", command=script, env=env, inherit=True, cwd=None, filtered=False)
    assert waiting.code(0, 3) == 0


def test_no_worker_must_start_if_a_folder_is_not_the_one_the_orchestrator_sees(waiting):
    (waiting.folder / "0.py").write_text("print('ran')")
    script, env = [str(waiting.folder / "0.py")], {"RANK": "0"}
    device, inode = waiting.folder.stat().st_dev, waiting.folder.stat().st_ino
    here = f"{device}:{inode}"
    for folders, why in (
        ({str(waiting.folder): f"{device}:{inode + 1}"}, "is not the folder that the orchestrator sees"),
        ({str(waiting.folder): f"{device + 1}:{inode}"}, "is not the folder that the orchestrator sees"),
        ({"/none": here}, "cannot be read"),
    ):
        waiting.pipe.heard.clear()
        waiting.pipe.ask("start", command=script, env=env, inherit=True, cwd=None, folders=folders)
        assert why in waiting.pipe.until("refused")["error"]
    assert waiting.log(0) == "" and waiting.status()["running"] == {}
    waiting.pipe.ask("start", command=script, env=env, inherit=True, cwd=None, folders={str(waiting.folder): here})
    assert waiting.code(0) == 0


# --- reports


def test_a_node_must_report_when_a_worker_ended_and_its_current_time(waiting):
    before = time.time()
    assert waiting.run(0, "print('ran')") == 0
    waiting.pipe.ask("status")
    status, ended = waiting.pipe.until("status"), waiting.pipe.until("ended", rank=0)
    assert before <= ended["at"] <= status["time"] <= time.time()


def test_a_node_must_report_the_process_id_of_a_worker(waiting):
    waiting.start(0, PAUSES)
    pid = waiting.pipe.until("started", rank=0, generation=0)["pid"]
    assert pid == int(eventually(lambda: waiting.log(0)))
    assert waiting.status()["running"]["0"]["pid"] == pid


def test_a_worker_that_the_fence_keeps_from_starting_must_count_as_stopped(waiting):
    (waiting.folder / "generation").write_text("1\n")
    assert waiting.run(0, "print('late')") == 143
    ended = waiting.pipe.until("ended", rank=0)
    assert (ended["generation"], ended["stopping"], ended["hint"]) == (0, True, "")


def test_a_node_asked_to_end_must_stop_its_workers_start_no_more_and_exit(tmp_path):
    node = Waiting(tmp_path, NODE_GRACE="1000")
    node.start(0, STUBBORN)
    eventually(lambda: "ready\n" in node.log(0))
    node.pipe.ask("end")
    eventually(lambda: "asked" in node.log(0))
    assert node.run(1, "print('late')") == 143
    assert node.log(1) == "" and node.pipe.until("ended", rank=1)["stopping"] is True
    os.kill(node.status()["running"]["0"]["pid"], signal.SIGKILL)
    ended = node.pipe.until("ended", rank=0)
    assert (ended["code"], ended["hint"], ended["stopping"]) == (137, "ending", True)
    assert node.node.wait(timeout=150) == 0
    node.pipe.close()


def test_a_stop_must_reach_running_workers_once_and_no_later_workers(tmp_path):
    node = Waiting(tmp_path, NODE_GRACE="1000")
    node.start(0, f"import os\nimport signal\nsignal.signal(signal.SIGURG, lambda *_: os._exit(5))\n{STUBBORN}")
    eventually(lambda: "ready\n" in node.log(0))
    node.pipe.ask("stop", kill=False)
    eventually(lambda: "asked\n" in node.log(0))
    node.pipe.ask("stop", kill=False)
    pid = node.status()["running"]["0"]["pid"]
    assert node.run(1, "print('next')") == 0
    os.kill(pid, signal.SIGURG)  # delivered after a second SIGTERM
    assert node.code(0) == 5
    assert node.log(0) == "ready\nasked\n"
    node.end()


def test_a_worker_of_another_job_must_take_over_a_node_that_was_not_cleaned(waiting):
    waiting.command(0, "-c", PAUSES, JOB_ID="one", TORCHELASTIC_RESTART_COUNT="3")
    pid = waiting.pipe.until("started", rank=0, generation=3)["pid"]
    waiting.command(0, "-c", "print('ran')", JOB_ID="other")
    assert waiting.code(0) == 0
    assert gone(pid)
    assert waiting.status() == {"generation": 0, "codes": {"0": 0}, "hints": {"0": ""}, "running": {}}


# --- causes


def test_an_out_of_memory_kill_must_be_attributed_to_the_worker_that_ends_next(tmp_path):
    counter = tmp_path / "memory.events"
    counter.write_text("oom 7\noom_kill 2\noom_group_kill 5\n")
    node = Waiting(tmp_path, before=f"worker.OOM_COUNTERS = ({str(counter)!r},)")
    assert node.run(0, "raise SystemExit(1)") == 1
    assert node.run(1, f"open({str(counter)!r}, 'w').write('oom_kill 3')\nraise SystemExit(1)") == 1
    assert node.run(2, "raise SystemExit(1)") == 1
    assert node.status()["hints"] == {"0": "", "1": "oom", "2": ""}
    node.end()


def test_out_of_memory_kills_must_be_read_from_the_counter_that_the_kernel_maintains(monkeypatch, tmp_path):
    paths = [tmp_path / name for name in ("v2", "v1", "machine")]
    monkeypatch.setattr(worker, "OOM_COUNTERS", tuple(map(str, paths)))
    assert worker.oom_kills() == 0
    paths[2].write_text("pgfault 9\noom_kill 7\n")
    assert worker.oom_kills() == 7
    paths[1].write_text("oom_kill_disable 1\nunder_oom 0\n")  # an old kernel, which has no counter there
    assert worker.oom_kills() == 7
    paths[1].write_text("oom_kill_disable 1\nunder_oom 0\noom_kill 3\n")
    assert worker.oom_kills() == 3
    paths[0].write_text("oom 8\noom_kill 2\noom_group_kill 1\n")
    assert worker.oom_kills() == 2


def test_out_of_memory_kills_must_be_counted_in_the_group_of_the_node():
    # Slurm limits the memory of a group far below that of its machine, which here is a container.
    v1 = "5:cpu,cpuacct:/\n4:memory:/docker/1f/slurm_n1/job_1\n0::/docker/1f\n"
    first = "/sys/fs/cgroup/memory/docker/1f/slurm_n1/job_1/memory.oom_control"
    found = [*worker.counters(v1)]
    assert found[0] == first and found.index("/sys/fs/cgroup/memory/slurm_n1/job_1/memory.oom_control") == 2
    assert found[-2:] == ["/sys/fs/cgroup/memory.events", "/proc/vmstat"]
    v2 = "0::/system.slice/slurmstepd.scope/job_1/step_0/user/task_0\n"
    step = "/sys/fs/cgroup/system.slice/slurmstepd.scope/job_1/step_0/user/task_0/memory.events"
    assert [*worker.counters(v2)][0] == step
    assert [*worker.counters("0::/\n")] == ["/sys/fs/cgroup/memory.events", "/proc/vmstat"]
    assert [*worker.counters("")] == ["/proc/vmstat"]


def test_a_node_that_is_cut_off_must_report_it_for_the_workers_that_it_killed(tmp_path):
    node = Waiting(tmp_path, before="lease.LEASE_TIMEOUT, lease.RENEW_INTERVAL = 0.3, 0.05")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))
        orphan = "import subprocess\nsubprocess.run('sleep 1000 & echo $!', shell=True, start_new_session=True)\n"
        node.start(0, orphan + PAUSES)
        pid, _ = eventually(lambda: len(found := node.log(0).split()) == 2 and found)
        node.pipe.ask("lease", relay=silent.getsockname())
        ended = node.pipe.until("ended", rank=0)
    assert (ended["code"], ended["hint"]) == (137, "cut off")
    assert gone(int(pid))
    node.end()


def test_workers_started_after_a_node_was_cut_off_must_not_be_reported_as_cut_off():
    callbacks, messages = [], []
    loop: Any = SimpleNamespace(
        workers=[],
        ending=False,
        start=lambda command, env, cwd, done, started: callbacks.append(done),
        close_store=lambda: None,
        end_leftovers=lambda most: None,
    )
    node = agent.Agent(loop, KEY)
    channel: Any = SimpleNamespace(send=messages.append)
    node.channels.append(channel)
    for generation in range(2):
        env = {"RANK": "0", "TORCHELASTIC_RESTART_COUNT": str(generation)}
        node.start(protocol.Start(["script.py"], env, inherit=False), env)
        if generation == 0:
            node.cut_off()
        callbacks[generation](1)
    assert [message.hint for message in messages] == ["cut off", ""]


# --- open files


@pytest.mark.parametrize("preload", ["", PRELOAD], ids=["fresh", "warm"])
def test_a_node_must_keep_no_files_open_for_workers_that_have_ended(tmp_path, preload):
    limit = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24))"  # the zygote inherits it
    node = Waiting(tmp_path, preload, before=limit)
    for rank in range(24):
        assert node.run(rank, f"import sys\nprint('{PRELOAD}' in sys.modules)") == 0
        assert node.log(rank) == f"{bool(preload)}\n"
    node.end()


# --- forked workers


def test_a_forked_process_must_be_polled_like_a_direct_child():
    with subprocess.Popen(["sleep", "1000"]) as process:
        forked = Forked(process.pid)
        assert forked.poll() is None
        os.kill(process.pid, signal.SIGSEGV)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert forked.poll() == forked.poll() == -signal.SIGSEGV
        assert Forked(process.pid).poll() == -signal.SIGKILL  # its exit code has been collected elsewhere


def test_an_import_that_takes_too_long_must_not_block_workers(tmp_path):
    (tmp_path / "slow.py").write_text("import signal\nsignal.pause()")
    node = Waiting(tmp_path, "slow", before="loop.IMPORT_TIMEOUT = warm.IMPORT_TIMEOUT = 0.5")
    node.start(0, "print('ran')")
    assert node.code(0) == 0
    assert "importing took longer than 0.5 s" in node.out.read_text()
    assert descendants(node.node.pid) == []
    node.end()


def test_a_zygote_that_does_not_fork_in_time_must_be_killed(tmp_path):
    node = Waiting(tmp_path, PRELOAD, before="warm.FORK_TIMEOUT = 0.2")
    assert node.run(0, "print('ran')") == 0
    (zygote,) = eventually(lambda: len(found := descendants(node.node.pid)) == 1 and found)
    os.kill(zygote, signal.SIGSTOP)
    for rank in (1, 2):
        assert node.run(rank, f"import sys\nprint('{PRELOAD}' in sys.modules)") == 0
        assert node.log(rank) == "False\n"
    assert node.out.read_text().count("does not respond") == 1
    assert gone(zygote)
    node.end()


def test_a_worker_that_cannot_start_must_be_reported_without_affecting_others(tmp_path):
    limit = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (22, 22))"
    node = Waiting(tmp_path, before=limit)
    for rank in range(12):
        node.start(rank, PAUSES)
    assert node.code(11) == 126
    assert node.pipe.until("started", rank=0)
    node.pipe.ask("stop", kill=False)
    assert node.code(0) == 143
    assert "[node] rank 11 did not start: " in node.out.read_text()
    node.end()


# --- a node on another machine


@pytest.fixture
def remote(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    yield node
    node.end()


def test_a_node_with_its_own_job_folder_must_write_the_fence_there(remote):
    link = remote.connect()
    remote.start(link, PAUSES)
    assert remote.until(link, protocol.Started)
    assert (remote.job / "generation").read_text() == "0\n"
    link.send(protocol.Stop(kill=False))
    assert remote.until(link, protocol.Ended).code == 143
    assert (remote.job / "generation").read_text() == "0 over\n"
    remote.start(link, PAUSES)
    assert remote.until(link, protocol.Ended).code == 143
    remote.start(link, "print(open('job/generation').read())", generation=2)
    assert remote.until(link, protocol.Ended).code == 0
    assert (remote.job / "logs" / "rank-0.log").read_text().endswith("[node] generation 2\n2\n\n")


def test_a_node_with_a_shared_job_folder_must_leave_the_fence_to_the_orchestrator(waiting):
    assert waiting.run(0, "print('ran')", generation=1) == 0
    waiting.pipe.ask("stop", kill=False)
    assert waiting.status()["generation"] == 1
    assert not (waiting.folder / "generation").exists()


def test_a_connection_for_files_must_receive_no_messages_about_workers(remote):
    files, link = remote.connect(), remote.connect()
    assert files.converse(protocol.GetChanges(str(remote.job), {}), protocol.Changes).files == {}
    remote.start(link, "print('ran')")
    assert remote.until(link, protocol.Ended).code == 0
    files.sock.setblocking(False)
    with pytest.raises(BlockingIOError):
        files.sock.recv(1)


def test_a_worker_on_another_machine_must_use_a_network_interface_of_that_machine(remote):
    link = remote.connect()
    remote.start(link, "import os\nprint(os.environ['GLOO_SOCKET_IFNAME'])")
    assert remote.until(link, protocol.Ended).code == 0
    assert (remote.job / "logs" / "rank-0.log").read_text() in ("lo\n", "lo0\n")


def test_requests_of_an_earlier_job_must_be_ignored_after_a_node_was_cleaned(waiting):
    request = {"ask": "start", "command": ["-c", PAUSES], "env": {"RANK": "0"}, "inherit": True, "cwd": None}
    with dial(waiting.folder / "s") as known, dial(waiting.folder / "s") as late:
        ends = [End(known), End(late)]
        for end in ends:
            end.meet()
        ends[0].ask("status")
        assert ends[0].hear()["say"] == "status" and waiting.status()["generation"] == -1  # all clients are connected
        waiting.node.send_signal(signal.SIGSTOP)  # so that it reads everything at once
        waiting.pipe.ask("clean")
        known.sendall(ends[0].signer.sign(json.dumps(request).encode()))  # the line ends later
        ends[1].send(json.dumps(request).encode())
        waiting.node.send_signal(signal.SIGCONT)
        assert waiting.pipe.until("cleaned")
        for sock in (known, late):
            with contextlib.suppress(ConnectionError):
                sock.sendall(b"\n")
                assert sock.recv(1 << 16) == b""
    assert waiting.status() == {"generation": -1, "codes": {}, "hints": {}, "running": {}}
    assert descendants(waiting.node.pid) == []
