"""A node must keep nothing of a job when it is cleaned for the next one, or must exit."""

import fcntl
import os
import signal
import sys

import pytest
from support.agents import PRELOAD, Pipe, Waiting
from support.namespaces import possible
from support.processes import gone
from support.waiting import eventually

from orchestrate.node import warm


def test_a_cleaned_node_must_keep_no_state_or_processes_of_the_last_job(waiting):
    code = (
        "import os, subprocess\nprint(os.getpid(), subprocess.Popen(['sleep', '1000'], start_new_session=True).pid)\n"
    )
    waiting.start(0, code + "import signal\nsignal.pause()")
    pids = eventually(lambda: waiting.log(0).split())
    waiting.pipe.ask("clean")
    assert waiting.pipe.until("cleaned")
    assert all(gone(int(pid)) for pid in pids)
    assert waiting.status() == {"generation": -1, "codes": {}, "hints": {}, "running": {}}
    assert not [message for message in waiting.pipe.heard if message["say"] == "ended"]


@pytest.mark.parametrize("name", [rb"\xff\xfe", rb") R 1 (", rb"a b) (\n"], ids=["bytes", "brackets", "lines"])
def test_process_names_chosen_by_a_worker_must_not_hide_its_processes(waiting, name):
    named = f"import ctypes\nctypes.CDLL(None).prctl(15, b'{name.decode()}')\n"
    inner = f"{named}import signal\nprint('ready', flush=True)\nsignal.pause()"
    own_session = f"subprocess.Popen([sys.executable, '-c', {inner!r}], start_new_session=True, stdout=-1)"
    waiting.start(
        0,
        f"{named}import signal, subprocess, sys\np = {own_session}\np.stdout.readline()\nprint(p.pid)\nsignal.pause()",
    )
    pid = int(eventually(lambda: waiting.log(0)))
    eventually(lambda: waiting.status()["running"]["0"]["state"] == "S")
    waiting.pipe.ask("clean")
    assert waiting.pipe.until("cleaned")
    assert gone(pid)


def test_a_cleaned_node_must_continue_to_fork_workers(tmp_path):
    node = Waiting(tmp_path, PRELOAD)
    for rank in range(2):
        assert node.run(rank, f"import sys\nprint('{PRELOAD}' in sys.modules)") == 0
        assert node.log(rank) == "True\n"
        node.pipe.ask("clean")
        assert node.pipe.until("cleaned")
        node.pipe.heard.clear()
    node.end()


CHANGES = {
    "fewer descriptors": "resource.prlimit(pid, resource.RLIMIT_NOFILE, (64, 64))",
    "small files": "resource.prlimit(pid, resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))",
    "priority": "os.setpriority(os.PRIO_PROCESS, pid, 5)",
    "scheduler": "os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))",
    "cores": "os.sched_setaffinity(pid, {min(os.sched_getaffinity(0))})",
    "disk priority": "import ctypes\nassert not ctypes.CDLL(None).syscall(IOPRIO_SET, 1, pid, 3 << 13)",
}
IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
ZYGOTE = """
node = os.getppid()
(pid,) = {*map(int, open(f"/proc/{node}/task/{node}/children").read().split())} - {os.getpid()}
"""


@pytest.mark.parametrize("process", ["node", "zygote"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_node_that_was_changed_by_a_job_must_exit_instead_of_running_another(tmp_path, change, process):
    if "affinity" in change and len(os.sched_getaffinity(0)) < 2:
        pytest.skip("this machine has only one core")
    change = change.replace("IOPRIO_SET", str(IOPRIO_SET[os.uname().machine]))
    node = Waiting(tmp_path, PRELOAD)
    find = "pid = os.getppid()" if process == "node" else ZYGOTE
    assert node.run(0, f"import os, resource\n{find}\n{change}") == 0, node.log(0)
    node.pipe.ask("clean")
    assert node.pipe.until("cleaned") is None
    assert node.node.wait(timeout=150) == 0
    assert "cannot be cleaned for another job: the job has changed" in node.out.read_text()
    node.pipe.close()


def test_a_node_whose_zygote_was_changed_while_it_imported_must_exit(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "slow.py").write_text("open('fifo').close()\n")
    (tmp_path / "before.py").write_text(f"import os, resource\n{ZYGOTE}\n{CHANGES['small files']}\n")
    (tmp_path / "0.py").write_text("")
    node = Waiting(tmp_path, "slow")
    before, env = [sys.executable, "before.py"], {"RANK": "0", "TORCHELASTIC_RESTART_COUNT": "0"}
    node.pipe.ask("start", command=["0.py"], env=env, inherit=True, cwd=None, before=before)
    (tmp_path / "fifo").write_text("")  # as soon as the zygote reads it
    assert node.code(0) == 0, node.log(0)
    node.pipe.ask("clean")
    assert node.pipe.until("cleaned") is None
    assert node.node.wait(timeout=150) == 0
    node.pipe.close()


BOUND = """
import socket
listener = socket.create_server(("127.0.0.2", 0))
server = socket.socket()
server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, {reuse})
server.bind(("127.0.0.1", {port}))
server.connect(listener.getsockname())
accepted, _ = listener.accept()
server.close()  # the end that closes first waits for a minute
accepted.recv(1)
"""
ALONE = (
    "import ctypes, subprocess\nassert not ctypes.CDLL(None).unshare(0x40000000)  # CLONE_NEWNET\n"
    "subprocess.run(['ip', 'link', 'set', 'lo', 'up'], check=True)\n"
)


@pytest.mark.parametrize(("port", "reuse", "cleaned"), [(29500, 0, False), (30499, 0, False), (29500, 1, True)])
def test_a_node_with_a_port_that_a_job_blocks_for_later_stores_must_exit(tmp_path, port, reuse, cleaned):
    possible()
    node = Waiting(tmp_path, before=ALONE, NODE_WIPE=str(tmp_path / "wiped"))
    assert node.run(0, BOUND.format(port=port, reuse=reuse)) == 0, node.log(0)
    node.pipe.ask("clean")
    assert bool(node.pipe.until("cleaned")) == cleaned
    node.end()
    assert cleaned or f"sockets of the job block port {port}" in node.out.read_text()


def test_a_zygote_must_continue_after_a_job_that_sent_it_sigstop(tmp_path):
    node = Waiting(tmp_path, PRELOAD)
    wait = "while not os.path.exists('go'): time.sleep(0.01)"
    node.start(0, f"import os, signal, time\n{ZYGOTE}\n{wait}\nos.kill(pid, signal.SIGSTOP)")
    node.pipe.until("started", rank=0)
    (tmp_path / "go").touch()
    assert node.code(0) == 0, node.log(0)
    node.pipe.ask("clean")
    assert node.pipe.until("cleaned")
    assert node.run(1, "pass") == 0
    node.end()
    assert "starting a fresh interpreter for each worker" not in node.out.read_text()


def test_a_node_that_cannot_list_all_processes_must_not_report_itself_clean(tmp_path):
    failing_listdir = "import errno, os\ndef fails(path): raise OSError(errno.EMFILE, 'too many open files')\n"
    node = Waiting(
        tmp_path,
        before=failing_listdir + "wait_for = loop.Loop.finish\n"
        "def finish(self):\n    os.listdir = fails\n    wait_for(self)\nloop.Loop.finish = finish",
    )
    assert node.run(0, "pass") == 0
    node.pipe.ask("clean")
    assert node.pipe.until("cleaned") is None
    node.node.wait(timeout=150)
    node.pipe.close()


def test_a_node_must_listen_again_after_a_job_has_replaced_its_socket(waiting):
    code = (
        "import os, socket\npath = os.environ['NODE_SOCKET']\nos.rename(path, path + '-old')\n"
        "sock = socket.socket(socket.AF_UNIX)\nsock.bind(path)\nsock.listen()\n"
    )
    assert waiting.run(0, code) == 0
    waiting.pipe.ask("clean")
    assert waiting.pipe.until("cleaned")
    waiting.pipe.close()
    waiting.pipe = Pipe(waiting.env)
    assert waiting.status()["generation"] == -1


WITHOUT_CAPABILITIES = (
    "import ctypes; assert not ctypes.CDLL(None).capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)())"
)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process that its parent may not kill")
def test_a_process_that_a_node_may_not_kill_must_not_end_the_node(tmp_path):
    node = Waiting(tmp_path, before=WITHOUT_CAPABILITIES)  # like a node started by sudo
    code = (
        "import os, signal\nready, done = os.pipe()\npid = os.fork()\nif pid == 0:\n    os.setsid()\n"
        "    os.setuid(65534)\n    os.write(done, b'x')\n    signal.pause()\nos.read(ready, 1)\n"
    )
    assert node.run(0, f"{code}print(pid)") == 0
    pid = int(node.log(0))
    try:
        node.pipe.ask("clean")
        assert node.pipe.until("cleaned")
        assert node.run(0, "print('ran')") == 0
        node.end()
    finally:
        os.kill(pid, signal.SIGKILL)


PROCESSES = {  # process id: state, parent, user
    1: (b"S", 0, 1000),
    7: (b"S", 1, 1000),  # the zygote
    8: (b"Z", 1, 1000),
    20: (b"S", 0, 65534),  # started by the engine beside the node
    21: (b"S", 20, 1000),  # started by 20 on behalf of a worker
    22: (b"Z", 20, 1000),  # reaped by its parent
    23: (b"S", 0, -1),  # exits at this moment
}


@pytest.mark.parametrize(("own", "found"), [(1, [7, 8, 21]), (20, [21, 22])])
def test_all_processes_of_the_nodes_user_must_count_as_left_over_in_a_container(monkeypatch, own, found):
    listed = [(pid, [state, b"%d" % parent]) for pid, (state, parent, _) in PROCESSES.items()]
    monkeypatch.setattr(warm, "processes", lambda: iter(listed))
    monkeypatch.setattr(warm, "user", lambda pid: PROCESSES[pid][2])
    monkeypatch.setattr(os, "getpid", lambda: own)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert warm.leftover_processes() == found


def test_the_user_of_a_process_must_be_found_regardless_of_its_proc_folder():
    assert warm.user(os.getpid()) == os.geteuid() and warm.user(1 << 22) == -1


FLOOD = """
import fcntl, os, signal
fcntl.fcntl(1, fcntl.F_SETPIPE_SZ, 1 << 20)
ready, own_session = os.pipe()
for _ in range(6):
    if not os.fork():
        os.setsid()
        os.write(own_session, b"x")
        signal.alarm(250)
        try:
            while True:
                os.write(1, b"\\n" * 65536)
        except BrokenPipeError:
            signal.alarm(0)
            open(f"{os.getpid()}.left", "w").close()
            signal.pause()
    os.read(ready, 1)  # otherwise it might end with this process, whose group is killed
"""


@pytest.mark.skipif(not hasattr(fcntl, "F_SETPIPE_SZ"), reason="only Linux can enlarge a pipe")
def test_the_end_of_a_worker_must_be_reported_though_processes_that_it_has_left_go_on_writing(waiting):
    assert waiting.run(0, FLOOD) == 0
    eventually(lambda: len([*waiting.folder.glob("*.left")]) == 6)
    waiting.pipe.ask("clean")
    assert waiting.pipe.until("cleaned")
