"""A node that waits must do what it is asked, say what came of it, and take no harm from who asks."""

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

import pytest
from conftest import descendants, eventually, gone
from support.agents import PRELOAD, Waiting
from support.ends import KEY, End
from test_sync import Node

from orchestrate.node import agent as wait
from orchestrate.node import protocol, worker
from orchestrate.node.warm import Forked

PAUSES = "import os, signal\nprint(os.getpid())\nsignal.pause()"
STUBBORN = "import signal\nsignal.signal(15, lambda *_: print('asked'))\nprint('ready')\nwhile True: signal.pause()"


@pytest.fixture
def waiting(tmp_path: Path) -> Iterator[Waiting]:
    node = Waiting(tmp_path)
    yield node
    node.end()


def dial(path: Path) -> socket.socket:
    """A connection to a node, which may not listen yet."""

    def connected() -> socket.socket | None:
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(30)
        try:
            sock.connect(str(path))
            return sock
        except OSError:
            sock.close()
            return None

    return eventually(connected)


# --- who asks


def test_a_node_must_be_found_by_its_hosts_name_in_the_folder_of_sockets(tmp_path):
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


def test_a_node_must_do_without_a_folder_of_sockets_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    node = Waiting(tmp_path, NODE_SOCKETS=str(tmp_path / "file" / "nodes"))
    assert node.run(0, "print('ran')") == 0
    node.end()


def test_the_socket_of_an_earlier_life_must_not_be_in_the_way(tmp_path):
    with socket.socket(socket.AF_UNIX) as old:
        old.bind(str(tmp_path / "s"))
    node = Waiting(tmp_path)
    assert node.run(0, "print('ran')") == 0
    node.end()


def test_a_request_must_count_however_it_is_cut_and_though_who_asked_has_gone(waiting):
    assert waiting.status()["generation"] == -1
    asked = []
    for rank in range(2):
        (waiting.folder / f"{rank}.py").write_text("print('ran')")
        env = {"RANK": str(rank), "JOB_DIR": str(waiting.folder)}
        command = [str(waiting.folder / f"{rank}.py")]
        asked.append(json.dumps({"ask": "start", "command": command, "env": env, "inherit": True, "cwd": None}))
    with dial(waiting.folder / "s") as sock:
        end = End(sock)
        end.meet()
        text = b"".join(end.signer.sign(each.encode()) + b"\n" for each in asked)
        half = len(asked[0]) // 2
        sock.sendall(text[:half])
        assert waiting.status()["running"] == {}  # so the node has read the first half
        sock.sendall(text[half:])
    assert [waiting.code(rank) for rank in range(2)] == [0, 0]


def test_a_worker_must_not_make_files_that_are_its_owners_alone(waiting):
    assert waiting.run(0, "print(open('/proc/self/status').read())") == 0
    (mask,) = re.findall(r"^Umask:.*$", Path("/proc/self/status").read_text(), re.M)
    assert mask in waiting.log(0)  # as sockets of the node are


def test_no_worker_must_start_where_a_filter_is_expected_and_there_is_none(waiting):
    (waiting.folder / "0.py").write_text("print('ran')")
    script, env = [str(waiting.folder / "0.py")], {"RANK": "0", "TORCHELASTIC_RESTART_COUNT": "3"}
    waiting.pipe.ask("start", command=script, env=env, inherit=True, cwd=None, filtered=True)
    ended = waiting.pipe.until("ended", rank=0, generation=3)
    assert (ended["code"], ended["hint"], ended["asked"]) == (143, "ending", False)
    assert waiting.log(0) == "" and waiting.status()["generation"] == -1
    waiting.pipe.heard.clear()
    waiting.pipe.ask("start", command=script, env=env, inherit=True, cwd=None, filtered=False)
    assert waiting.code(0, 3) == 0


def test_no_worker_must_start_where_a_folder_is_another_one_than_the_orchestrators(waiting):
    (waiting.folder / "0.py").write_text("print('ran')")
    script, env = [str(waiting.folder / "0.py")], {"RANK": "0"}
    here = waiting.folder.stat().st_ino
    for folders, why in (
        ({str(waiting.folder): here + 1}, "is not the folder that the orchestrator sees"),
        ({"/none": 1}, "cannot be read"),
    ):
        waiting.pipe.heard.clear()
        waiting.pipe.ask("start", command=script, env=env, inherit=True, cwd=None, folders=folders)
        assert why in waiting.pipe.until("refused")["error"]
    assert waiting.log(0) == "" and waiting.status()["running"] == {}
    waiting.pipe.ask("start", command=script, env=env, inherit=True, cwd=None, folders={str(waiting.folder): here})
    assert waiting.code(0) == 0


# --- what it says


def test_a_node_must_say_when_a_worker_ended_and_what_time_it_is(waiting):
    before = time.time()
    assert waiting.run(0, "print('ran')") == 0
    waiting.pipe.ask("status")
    status, ended = waiting.pipe.until("status"), waiting.pipe.until("ended", rank=0)
    assert before <= ended["at"] <= status["time"] <= time.time()


def test_a_node_must_say_which_process_a_worker_is(waiting):
    waiting.start(0, PAUSES)
    pid = waiting.pipe.until("started", rank=0, generation=0)["pid"]
    assert pid == int(eventually(lambda: waiting.log(0)))
    assert waiting.status()["running"]["0"]["pid"] == pid


def test_a_worker_that_must_not_start_must_end_as_one_that_was_asked_to(waiting):
    (waiting.folder / "generation").write_text("1\n")
    assert waiting.run(0, "print('late')") == 143
    ended = waiting.pipe.until("ended", rank=0)
    assert (ended["generation"], ended["asked"], ended["hint"]) == (0, True, "")


def test_a_node_that_is_asked_to_end_must_stop_its_workers_start_no_more_and_end(tmp_path):
    node = Waiting(tmp_path, NODE_GRACE="1000")
    node.start(0, STUBBORN)
    eventually(lambda: "ready\n" in node.log(0))
    node.pipe.ask("end")
    eventually(lambda: "asked" in node.log(0))
    assert node.run(1, "print('late')") == 143
    assert node.log(1) == "" and node.pipe.until("ended", rank=1)["asked"] is True
    os.kill(node.status()["running"]["0"]["pid"], signal.SIGKILL)
    ended = node.pipe.until("ended", rank=0)
    assert (ended["code"], ended["hint"], ended["asked"]) == (137, "ending", True)
    assert node.node.wait(timeout=150) == 0
    node.pipe.close()


def test_a_stop_must_be_for_those_that_run_and_be_asked_for_once(tmp_path):
    node = Waiting(tmp_path, NODE_GRACE="1000")
    node.start(0, f"import os\nimport signal\nsignal.signal(signal.SIGURG, lambda *_: os._exit(5))\n{STUBBORN}")
    eventually(lambda: "ready\n" in node.log(0))
    node.pipe.ask("stop", kill=False)
    eventually(lambda: "asked\n" in node.log(0))
    node.pipe.ask("stop", kill=False)
    pid = node.status()["running"]["0"]["pid"]
    assert node.run(1, "print('next')") == 0
    os.kill(pid, signal.SIGURG)  # which comes after a second SIGTERM
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


# --- why workers end


def test_a_lack_of_memory_must_be_told_of_the_worker_that_ends_after_it(tmp_path):
    counter = tmp_path / "memory.events"
    counter.write_text("oom 7\noom_kill 2\noom_group_kill 5\n")
    node = Waiting(tmp_path, before=f"worker.OOM_COUNTERS = ({str(counter)!r},)")
    assert node.run(0, "raise SystemExit(1)") == 1
    assert node.run(1, f"open({str(counter)!r}, 'w').write('oom_kill 3')\nraise SystemExit(1)") == 1
    assert node.run(2, "raise SystemExit(1)") == 1
    assert node.status()["hints"] == {"0": "", "1": "oom", "2": ""}
    node.end()


def test_killed_processes_must_be_counted_where_the_kernel_counts_them(monkeypatch, tmp_path):
    paths = [tmp_path / name for name in ("v2", "v1", "machine")]
    monkeypatch.setattr(worker, "OOM_COUNTERS", tuple(map(str, paths)))
    assert worker.oom_kills() == 0
    paths[2].write_text("pgfault 9\noom_kill 7\n")
    assert worker.oom_kills() == 7
    paths[1].write_text("oom_kill_disable 1\nunder_oom 0\n")  # of an old kernel, which does not count them there
    assert worker.oom_kills() == 7
    paths[1].write_text("oom_kill_disable 1\nunder_oom 0\noom_kill 3\n")
    assert worker.oom_kills() == 3
    paths[0].write_text("oom 8\noom_kill 2\noom_group_kill 1\n")
    assert worker.oom_kills() == 2


def test_a_node_that_was_cut_off_must_say_so_of_the_workers_that_it_killed(tmp_path):
    node = Waiting(tmp_path, before="lease.LEASE_TIMEOUT, lease.RENEW_INTERVAL = 0.3, 0.05")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))
        node.start(0, PAUSES)
        assert node.pipe.until("started", rank=0)
        node.pipe.ask("lease", relay=silent.getsockname())
        ended = node.pipe.until("ended", rank=0)
    assert (ended["code"], ended["hint"]) == (137, "cut off")
    node.end()


def test_workers_that_start_after_a_node_was_cut_off_must_end_for_reasons_of_their_own():
    ends, told = [], []
    loop = SimpleNamespace(workers=[], ending=False, start=lambda command, env, cwd, done, started: ends.append(done))
    node = wait.Agent(loop, KEY)
    node.channels.append(SimpleNamespace(send=told.append))
    for generation in range(2):
        node.start(["script.py"], {"RANK": "0", "TORCHELASTIC_RESTART_COUNT": str(generation)}, None)
        if generation == 0:
            node.cut_off()
        ends[generation](1)
    assert [end.hint for end in told] == ["cut off", ""]


# --- what it leaves


@pytest.mark.parametrize("preload", ["", PRELOAD], ids=["fresh", "warm"])
def test_a_node_must_keep_nothing_open_of_workers_that_have_ended(tmp_path, preload):
    limit = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24))"  # what forks workers has it, too
    node = Waiting(tmp_path, preload, before=limit)
    for rank in range(24):
        assert node.run(rank, f"import sys\nprint('{PRELOAD}' in sys.modules)") == 0
        assert node.log(rank) == f"{bool(preload)}\n"
    node.end()


# --- forked elsewhere


def test_a_process_that_is_no_child_must_be_waited_for_as_one():
    with subprocess.Popen(["sleep", "1000"]) as process:
        forked = Forked(process.pid)
        assert forked.poll() is None
        os.kill(process.pid, signal.SIGSEGV)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert forked.poll() == forked.poll() == -signal.SIGSEGV
        assert Forked(process.pid).poll() == -signal.SIGKILL  # another part has taken its code


def test_an_import_that_takes_too_long_must_not_keep_workers_waiting(tmp_path):
    (tmp_path / "slow.py").write_text("import signal\nsignal.pause()")
    node = Waiting(tmp_path, "slow", before="loop.IMPORT_TIMEOUT = warm.IMPORT_TIMEOUT = 0.5")
    node.start(0, "print('ran')")
    assert node.code(0) == 0
    assert "importing took longer than 0.5 s" in node.out.read_text()
    assert descendants(node.node.pid) == []
    node.end()


def test_a_process_that_does_not_fork_in_time_must_be_given_up(tmp_path):
    node = Waiting(tmp_path, PRELOAD, before="warm.FORK_TIMEOUT = 0.2")
    assert node.run(0, "print('ran')") == 0
    (zygote,) = eventually(lambda: len(found := descendants(node.node.pid)) == 1 and found)
    os.kill(zygote, signal.SIGSTOP)
    for rank in (1, 2):
        assert node.run(rank, f"import sys\nprint('{PRELOAD}' in sys.modules)") == 0
        assert node.log(rank) == "False\n"
    assert node.out.read_text().count("does not answer") == 1
    assert gone(zygote)
    node.end()


def test_a_worker_for_which_there_is_no_room_must_have_an_end_and_no_other_be_harmed(tmp_path):
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
    made = Node(tmp_path)
    yield made
    made.end()


def test_a_node_that_is_alone_with_its_folder_must_say_there_which_generation_may_save(remote):
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


def test_a_node_that_shares_its_folder_must_leave_the_generation_to_the_orchestrator(waiting):
    assert waiting.run(0, "print('ran')", generation=1) == 0
    waiting.pipe.ask("stop", kill=False)
    assert waiting.status()["generation"] == 1
    assert not (waiting.folder / "generation").exists()


def test_who_asks_for_files_alone_must_not_be_told_of_workers(remote):
    files, link = remote.connect(), remote.connect()
    assert files.converse(protocol.GetChanges(str(remote.job), {}), protocol.Changes).files == {}
    remote.start(link, "print('ran')")
    assert remote.until(link, protocol.Ended).code == 0
    files.sock.setblocking(False)
    with pytest.raises(BlockingIOError):
        files.sock.recv(1)


def test_a_worker_on_another_machine_must_find_its_interface_there(remote):
    link = remote.connect()
    remote.start(link, "import os\nprint(os.environ['GLOO_SOCKET_IFNAME'])")
    assert remote.until(link, protocol.Ended).code == 0
    assert (remote.job / "logs" / "rank-0.log").read_text() in ("lo\n", "lo0\n")


def test_nothing_that_was_asked_for_an_earlier_job_must_be_done_in_a_cleaned_node(waiting):
    evil = {"ask": "start", "command": ["-c", PAUSES], "env": {"RANK": "0"}, "inherit": True, "cwd": None}
    with dial(waiting.folder / "s") as known, dial(waiting.folder / "s") as late:
        ends = [End(known), End(late)]
        for end in ends:
            end.meet()
        ends[0].ask("status")
        assert ends[0].hear()["say"] == "status" and waiting.status()["generation"] == -1  # all are connected
        waiting.node.send_signal(signal.SIGSTOP)  # so that it finds all of it at once
        waiting.pipe.ask("clean")
        known.sendall(ends[0].signer.sign(json.dumps(evil).encode()))  # whose end comes later
        ends[1].send(json.dumps(evil).encode())
        waiting.node.send_signal(signal.SIGCONT)
        assert waiting.pipe.until("cleaned")
        for sock in (known, late):
            with contextlib.suppress(ConnectionError):
                sock.sendall(b"\n")
                assert sock.recv(1 << 16) == b""
    assert waiting.status() == {"generation": -1, "codes": {}, "hints": {}, "running": {}}
    assert descendants(waiting.node.pid) == []
