"""torch's store must be hosted by the node of rank 0, from the first connection until all workers have ended."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys

import pytest
from support.agents import PRELOAD, Waiting
from support.ports import free_port
from support.processes import descendants, proc
from support.repo import ROOT
from support.waiting import eventually

NODE = str(ROOT / "orchestrate" / "node")
CLIENT = """
import os
from torch.distributed import TCPStore
store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
"""
WITHOUT_PACKAGES = "sys.path[:] = [path for path in sys.path if 'site-packages' not in path]"


def hosts(node: int) -> list[int]:
    """The processes that host a store for a node."""
    return [pid for pid in descendants(node) if "tcpstore.py" in " ".join(proc(pid, "cmdline"))]


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def agent(tmp_path, port):
    """A node whose workers expect torch's store at a free port."""
    node = Waiting(tmp_path, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    yield node
    node.end()


@pytest.mark.slow
def test_the_store_must_be_there_until_the_next_generation(agent, port):
    assert agent.run(0, CLIENT + "store.set('key', 'value')") == 0
    (host,) = hosts(agent.node.pid)
    assert agent.run(1, CLIENT + "print(store.get('key').decode())") == 0
    assert agent.log(1) == "value\n"
    assert hosts(agent.node.pid) == [host]
    assert agent.run(1, "print('of the next one')", generation=1) == 0
    eventually(lambda: not hosts(agent.node.pid))
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


@pytest.mark.slow
def test_the_store_must_be_killed_with_what_workers_have_left(agent):
    assert agent.run(0, CLIENT) == 0
    assert hosts(agent.node.pid)
    agent.pipe.ask("stop", kill=True, leftovers=True)  # a worker could have taken it over
    eventually(lambda: not hosts(agent.node.pid))


@pytest.mark.slow
def test_a_signal_to_all_processes_must_end_only_those_that_workers_have_started(tmp_path, port):
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    agent = Waiting(tmp_path, PRELOAD, **variables)
    try:
        waits = "import signal; signal.signal(15, lambda *_: print('asked', flush=True))\nprint('ready', flush=True)\n"
        agent.start(0, CLIENT + waits + "while True: signal.pause()")
        eventually(lambda: "ready" in agent.log(0))
        before = descendants(agent.node.pid)  # the zygote, the store and the worker
        assert len(before) == 3
        for pid in before:
            os.kill(pid, signal.SIGTERM)  # as Slurm does, to a step
        eventually(lambda: "asked" in agent.log(0))
        assert agent.run(1, CLIENT + "print('connected')") == 0
        assert {*before} <= {*descendants(agent.node.pid)}
    finally:
        agent.pipe.ask("stop", kill=True)  # otherwise, the node gives the worker time to end
        agent.end()


@pytest.mark.slow
def test_workers_must_be_killed_if_their_store_ends(agent):
    agent.start(0, CLIENT + "print('connected', flush=True)\nimport signal; signal.pause()")
    eventually(lambda: agent.log(0))
    (host,) = hosts(agent.node.pid)
    os.kill(host, signal.SIGKILL)
    assert agent.code(0) == 137
    assert agent.log(0).endswith("[node] rank 0 is killed: the process that hosts torch's store has ended\n")


@pytest.mark.slow
def test_the_store_must_be_hosted_though_a_job_has_removed_the_nodes_program(tmp_path, port, monkeypatch):
    shutil.copytree(ROOT / "orchestrate", tmp_path / "copy" / "orchestrate", ignore=shutil.ignore_patterns("*.pyc"))
    monkeypatch.setattr("support.agents.NODE", str(tmp_path / "copy" / "orchestrate" / "node"))
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    node = Waiting(tmp_path, **variables)
    assert node.run(0, "pass") == 0
    shutil.rmtree(tmp_path / "copy")
    assert node.run(1, CLIENT) == 0
    node.end()


@pytest.mark.slow
def test_a_late_answer_about_the_store_must_not_be_taken_for_one_about_a_worker(tmp_path, port):
    os.mkfifo(tmp_path / "go")
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    node = Waiting(tmp_path, PRELOAD, before="warm.FORK_TIMEOUT = 0.2", **variables)
    connects = f"import socket, sys\nprint('up', flush=True)\nopen('{tmp_path}/go').close()\n"
    node.start(0, connects + f"socket.create_connection(('127.0.0.1', {port}))")
    eventually(lambda: node.log(0))
    (zygote,) = [pid for pid in descendants(node.node.pid) if "zygote.py" in proc(pid, "cmdline")[2]]
    os.kill(zygote, signal.SIGSTOP)
    (tmp_path / "go").write_text("")
    eventually(lambda: hosts(node.node.pid))
    with contextlib.suppress(ProcessLookupError):  # it was killed
        os.kill(zygote, signal.SIGCONT)
    assert node.run(1, "raise SystemExit(3)") == 3
    node.end()


def test_workers_elsewhere_must_be_able_to_connect_while_modules_are_imported(tmp_path, port):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "slow.py").write_text("open('fifo').close()\n")
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    node = Waiting(tmp_path, "torch torch.distributed slow", **variables)
    node.start(0, CLIENT)
    assert node.pipe.until("listening", generation=0)
    with socket.create_connection(("127.0.0.1", port)):
        assert not hosts(node.node.pid) and node.status()["running"]["0"]["pid"] == 0
        (tmp_path / "fifo").write_text("")
        assert node.code(0) == 0
    assert len(hosts(node.node.pid)) == 1 and "interpreter" not in node.out.read_text()
    node.end()


def test_a_job_that_does_not_use_the_store_must_have_no_process_for_it(agent, port):
    agent.start(
        0, "import os\nprint(os.environ['TORCHELASTIC_USE_AGENT_STORE'], flush=True)\nimport signal; signal.pause()"
    )
    eventually(lambda: agent.log(0) == "True\n")
    assert not hosts(agent.node.pid)
    socket.create_connection(("127.0.0.1", port)).close()
    eventually(lambda: hosts(agent.node.pid))
    agent.pipe.ask("clean")
    assert agent.pipe.until("cleaned")
    assert not hosts(agent.node.pid)


def test_a_port_that_is_taken_must_be_named(agent, port):
    with socket.create_server(("127.0.0.1", port)):
        assert agent.run(0, "print('never')") == 126
    assert agent.log(0) == f"[node] rank 0 did not start: Address already in use: port {port}\n"
    assert agent.run(0, "print('now')", generation=1) == 0


def test_rank_0_must_host_the_store_itself_if_the_nodes_python_has_no_torch(tmp_path, port):
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    node = Waiting(tmp_path, before=WITHOUT_PACKAGES, **variables)
    code = f"import os, socket\nprint(os.environ['TORCHELASTIC_USE_AGENT_STORE'])\nsocket.create_server(('', {port}))"
    assert node.run(0, code) == 0
    assert node.log(0).endswith("False\n")
    node.end()


@pytest.mark.slow
def test_a_node_that_a_scheduler_started_must_host_the_store_until_workers_of_other_nodes_have_ended(tmp_path, port):
    from torch.distributed import TCPStore

    (tmp_path / "first.py").write_text(CLIENT + "store.set('key', 'value')\nprint(os.getpid(), flush=True)")
    env = {"NODE_RANK": "0", "NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    env |= {"NODE_MODE": "static", "JOB_DIR": str(tmp_path)}
    node = subprocess.Popen([sys.executable, "-I", NODE, str(tmp_path / "first.py")], env=os.environ | env)
    try:
        other = TCPStore("127.0.0.1", port, is_master=False)
        assert other.get("key") == b"value"
        eventually(lambda: len(descendants(node.pid)) == 1)  # rank 0 has ended, and its node hosts the store
        assert other.get("key") == b"value" and node.poll() is None
        del other
        assert node.wait(timeout=60) == 0
    finally:
        node.send_signal(signal.SIGTERM)
        node.wait()
