"""The memory of a node and of its zygote must be out of reach of workers of the same user."""

import json
import os
import subprocess
import uuid

import pytest
from support.agents import PRELOAD, WITHOUT_CAPABILITIES, Pipe, Waiting
from support.ends import KEY
from support.leftovers import docker
from support.repo import ROOT
from support.waiting import eventually

from orchestrate.spec.spec import IMAGE

# Run by a worker: reports which processes it can access, and whether it is an ordinary process itself.
PROBE = """
import ctypes, glob, json, os

libc = ctypes.CDLL(None, use_errno=True)

def parent(pid):
    try:
        return int(open(f"/proc/{pid}/stat", errors="replace").read().rpartition(")")[2].split()[1])
    except OSError:  # it has ended
        return 0

def mem(pid, flags):
    try:
        os.close(os.open(f"/proc/{pid}/mem", flags))
        return "opened"
    except PermissionError:
        return "refused"

def traced(pid):
    if libc.ptrace(16, pid, None, None):  # PTRACE_ATTACH
        return "refused"
    os.waitpid(pid, 0)
    libc.ptrace(17, pid, None, None)
    return "attached"

node = os.getppid()
pids = [int(path.split("/")[2]) for path in glob.glob("/proc/[0-9]*/stat")]
others = [pid for pid in pids if pid not in (node, os.getpid()) and parent(pid) == node]
zygotes = [pid for pid in others if "zygote.py" in open(f"/proc/{pid}/cmdline").read()]
tries = [f(pid) for pid in (node, *zygotes) for f in (lambda pid: mem(pid, 2), lambda pid: mem(pid, 0), traced)]
print(json.dumps({
    "node": node,
    "zygotes": len(zygotes),
    "tries": sorted(set(tries)),
    "own": mem("self", os.O_RDWR),
    "dumpable": libc.prctl(3, 0, 0, 0, 0),
    "owner": os.stat("/proc/self/fd").st_uid == os.getuid(),
    "capabilities": int(next(line for line in open("/proc/self/status") if line.startswith("CapEff")).split()[1], 16),
}))
"""


@pytest.fixture(params=["", PRELOAD], ids=["fresh", "warm"])
def node(tmp_path, request):
    waiting = Waiting(tmp_path, request.param, before=WITHOUT_CAPABILITIES)
    yield waiting
    waiting.end()


def expected(preload: str) -> dict:
    """The expected output of PROBE in a node with this preload."""
    return {
        "zygotes": bool(preload),
        "tries": ["refused"],
        "own": "opened",
        "dumpable": 1,
        "owner": True,
        "capabilities": 0,
    }


def test_a_worker_must_not_access_the_memory_of_its_node_or_its_zygote(node):
    assert node.run(0, PROBE) == 0
    found = json.loads(node.log(0))
    assert found.pop("node") == node.node.pid
    assert found == expected(node.env["NODE_PRELOAD"])


def test_a_node_without_capabilities_must_see_its_workers_and_their_leftover_processes(node):
    code = "import os, subprocess\nprint(subprocess.Popen(['sleep', '1000'], start_new_session=True).pid, flush=True)\n"
    node.start(0, code + "import signal\nsignal.pause()")
    pid = int(eventually(lambda: node.log(0)))
    running = node.status()["running"]["0"]
    assert running["state"] and running["cpu"] >= 0
    node.pipe.ask("clean")
    assert node.pipe.until("cleaned")
    assert not os.path.exists(f"/proc/{pid}")


@pytest.fixture
def container(docker_engine, tmp_path):
    """Start a node as process 1 of a container, with the privileges of a job's; `/workspace` is the test's folder."""
    name = f"node-{uuid.uuid4().hex[:12]}"
    tmp_path.chmod(0o755)
    rights = ["--user", "1000:1000", "--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--read-only"]
    rights += ["--tmpfs", "/tmp:mode=1777,exec", "--network", "none"]
    mounts = ["-v", f"{ROOT / 'orchestrate'}:/opt/orchestrate:ro", "-v", f"{tmp_path}:/workspace:ro"]

    def start(**env: str) -> str:
        options = [option for key, value in env.items() for option in ("-e", f"{key}={value}")]
        command = ["--entrypoint", "python", IMAGE, "/opt/orchestrate/node"]
        docker("run", "-d", "--name", name, *rights, *mounts, *options, *command)
        return name

    yield start
    subprocess.run(["docker", "rm", "--force", name], capture_output=True)


@pytest.mark.docker
@pytest.mark.parametrize("preload", ["", PRELOAD], ids=["fresh", "warm"])
def test_a_worker_in_a_container_must_not_access_the_memory_of_process_1(container, tmp_path, preload):
    (tmp_path / "0.py").write_text(PROBE)
    name = container(NODE_MODE="agent", NODE_KEY=KEY.hex(), NODE_PRELOAD=preload, JOB_DIR="/tmp/job")
    command = ["docker", "exec", "-i", name, "python", "-I", "-S", "/opt/orchestrate/node/programs/pipe.py"]
    pipe = Pipe(dict(os.environ), command)
    pipe.ask("start", command=["/workspace/0.py"], env={"RANK": "0"}, inherit=True, cwd=None)
    assert pipe.until("ended")["code"] == 0
    pipe.close()
    found = json.loads(docker("exec", name, "cat", "/tmp/job/logs/rank-0.log"))
    assert found.pop("node") == 1
    assert found == expected(preload)


@pytest.mark.docker
def test_process_1_must_end_on_sigterm_while_it_is_starting(container, tmp_path):
    slow = tmp_path / "nvidia-smi"
    slow.write_text("#!/bin/sh\ntouch /tmp/asked\nsleep 1000\n")
    slow.chmod(0o755)
    name = container(NODE_MODE="rendezvous", PATH="/workspace:/opt/venv/bin:/usr/local/bin:/usr/bin:/bin")
    eventually(lambda: not subprocess.run(["docker", "exec", name, "ls", "/tmp/asked"], capture_output=True).returncode)
    docker("stop", "--time", "20", name)  # after which it is killed
    assert docker("inspect", "--format", "{{.State.ExitCode}}", name).strip() == "143"
