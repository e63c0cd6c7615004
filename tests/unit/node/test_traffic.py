"""A node must know which bytes its workers exchange with each other, and whether they use torch and GPUs."""

import contextlib
import os
import socket
import struct
import subprocess
import sys
import time

import pytest

from orchestrate.node import traffic
from orchestrate.node.traffic import Traffic

LISTEN = """
import socket, sys
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
to_itself = socket.create_connection(server.getsockname()), server.accept()[0]
to_itself[0].sendall(b"x" * 5000)
other = server.accept()[0]
other.sendall(b"x" * 10_000)
print("sent", flush=True)
sys.stdin.read()
"""
CONNECT = """
import socket, sys
other = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
received = 0
while received < 10_000:
    received += len(other.recv(10_000))
print("received", flush=True)
sys.stdin.read()
"""
CLOSES = """
import socket, sys
others = [socket.create_connection(("127.0.0.1", int(port))) for port in sys.argv[1:]]
for other in others:
    received = 0
    while received < 10_000:
        received += len(other.recv(10_000))
print("received", flush=True)
input()
for other in others:
    other.close()
print("closed", flush=True)
sys.stdin.read()
"""


class Timers:
    """Timers that run when a test says so, and their clock."""

    def __init__(self) -> None:
        self.waiting: list = []
        self.now: float | None = None  # set by a test that moves the clock itself

    def time(self) -> float:
        return time.monotonic() if self.now is None else self.now

    def after(self, seconds: float, callback) -> None:
        self.waiting.append((seconds, callback))

    def fire(self) -> float:
        ((seconds, callback),) = self.waiting
        self.waiting.clear()
        callback()
        return seconds


@pytest.fixture
def start():
    """Start a worker: a process that leads a session; it ends with the test."""
    started = []

    def start(code: str, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", code, *arguments]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.communicate()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout
    return process.stdout.readline().strip()


def test_bytes_between_two_workers_must_count_for_both_and_those_to_itself_for_none(start):
    first = start(LISTEN)
    second = start(CONNECT, line(first))
    assert (line(first), line(second)) == ("sent", "received")
    node = Traffic(Timers(), lambda: {0: first.pid, 1: second.pid, 2: 0})  # rank 2 waits to be started
    while not (use := node.use(1)) or not use.sampled:  # until the precision of times is reached
        node.sample()
    uses = [node.use(0), node.use(1)]
    assert all(use and 10_000 <= use.exchanged < 10_010 for use in uses), uses
    assert all(use and use.connected == use.sampled > 0 for use in uses) and node.use(2) is None


@pytest.mark.parametrize("own_session", [False, True])
def test_bytes_of_a_child_process_must_count_for_its_worker(start, own_session):
    """A shell script has its training in a child process, and torchrun in one with its own session."""
    first = start(LISTEN)
    run = f"subprocess.run([sys.executable, '-c', {CONNECT!r}, {line(first)!r}], start_new_session={own_session})"
    shell = start(f"import subprocess, sys; print('started', flush=True); input(); {run}")
    assert line(shell) == "started"
    node = Traffic(Timers(), lambda: {0: first.pid, 1: shell.pid})
    node.sample()  # before there is a child, and long before the next regular scan
    assert shell.stdin
    shell.stdin.write("\n")
    shell.stdin.flush()
    assert (line(first), line(shell)) == ("sent", "received")
    node.next_scan = float("inf")
    node.sample()
    use = node.use(1)
    assert use and use.exchanged >= 10_000


def test_a_launcher_that_a_script_starts_must_be_found(start, tmp_path):
    (tmp_path / "torchrun").write_text("print('started', flush=True); input()")
    shell = start("import subprocess, sys; subprocess.run([sys.executable, '-u', sys.argv[1]])", f"{tmp_path}/torchrun")
    other = start("print('started', flush=True); input()", "torchrun")
    assert (line(shell), line(other)) == ("started", "started")
    node = Traffic(Timers(), lambda: {0: shell.pid, 1: other.pid})
    node.sample()
    uses = [node.use(0), node.use(1)]
    assert [use and use.launcher for use in uses] == ["torchrun", ""]


def test_the_most_that_a_connection_has_exchanged_must_be_kept_after_its_end(start):
    first = start(LISTEN)
    second = start(CONNECT, line(first))
    assert (line(first), line(second)) == ("sent", "received")
    pids = {0: first.pid, 1: second.pid}
    node = Traffic(Timers(), lambda: pids)
    node.sample()
    second.communicate()
    del pids[1]
    node.sample()
    use = node.use(1)
    assert use and use.exchanged >= 10_000
    node.forget()
    assert node.use(1) is None


def test_what_closed_connections_have_exchanged_must_count(start):
    others = [start(LISTEN) for _ in range(2)]
    closes = start(CLOSES, *map(line, others))
    assert [*map(line, others), line(closes)] == ["sent", "sent", "received"]
    pids = {rank: process.pid for rank, process in enumerate((*others, closes))}
    node = Traffic(Timers(), lambda: pids)
    node.sample()
    assert closes.stdin
    print(file=closes.stdin, flush=True)
    assert line(closes) == "closed"
    node.sample()
    use = node.use(2)
    assert use and use.exchanged >= 20_000


@pytest.mark.parametrize(
    ("local", "remote", "near"),
    [
        ("10.0.1.2", "10.0.1.3", True),
        ("172.18.0.2", "172.18.0.1", True),
        ("127.0.0.1", "127.0.0.1", True),
        ("172.18.0.2", "151.101.0.223", False),
        ("::1", "::1", True),
        ("fd00::2", "fd00::3", True),
        ("fd00::2", "2a04:4e42::223", False),
        ("10.0.1.2", "fd00::3", False),
    ],
)
def test_a_download_must_not_count_as_communication(local, remote, near):
    packed = [socket.inet_pton(socket.AF_INET6 if ":" in each else socket.AF_INET, each) for each in (local, remote)]
    connection = traffic.Connection(7, (packed[0], 1), (packed[1], 2), 100)
    assert traffic._near(connection) == near


@pytest.mark.parametrize(("in_container", "counts"), [(True, False), (False, True)])
def test_a_local_connection_to_another_program_must_not_count_in_a_container(in_container, counts):
    """Without containers, the other end may be a worker of another node."""
    local = b"\x7f\0\0\1"
    connection = traffic.Connection(7, (local, 1), (local, 2), 100)
    found = traffic._between_workers([connection], {7: 3}, in_container)
    assert found == ({3: {7: 100}} if counts else {})


def test_connections_between_two_workers_of_a_container_must_count_for_both():
    local = b"\x7f\0\0\1"
    ends = [traffic.Connection(7, (local, 1), (local, 2), 100), traffic.Connection(8, (local, 2), (local, 1), 100)]
    assert traffic._between_workers(ends, {7: 0, 8: 1}, in_container=True) == {0: {7: 100}, 1: {8: 100}}


def test_an_ipv4_address_must_be_read_from_a_socket_for_both_versions():
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True))
        client = stack.enter_context(socket.create_connection(("127.0.0.1", server.getsockname()[1])))
        accepted = stack.enter_context(server.accept()[0])
        ends = {(one.local[1], one.remote[1]): one for one in traffic.connections()}
        one = ends[server.getsockname()[1], client.getsockname()[1]]
        assert one.local[0] == one.remote[0] == socket.inet_aton("127.0.0.1")
        assert one.inode == os.fstat(accepted.fileno()).st_ino


def test_samples_must_be_most_frequent_at_first_and_end_with_the_workers(monkeypatch, start):
    timers = Timers()
    timers.now = 1000.0
    monkeypatch.setattr(traffic.time, "process_time", lambda: 0.0)  # a sample takes longer on a busy machine
    pids = {0: start("input()").pid}
    node = Traffic(timers, lambda: pids)
    node.start()
    node.start()  # of a second worker
    assert timers.fire() == traffic.MIN_INTERVAL
    timers.now += 10.0
    timers.fire()
    assert timers.fire() == 0.2
    timers.now += 100.0
    timers.fire()
    assert timers.fire() == traffic.MAX_INTERVAL
    for _ in range(6):
        timers.now = node.next_scan + 1
        timers.fire()
    assert node.next_scan - timers.now == traffic.SCAN_INTERVALS[1]
    node.start()  # of a worker whose child processes are new
    timers.now += 1
    timers.fire()
    assert node.next_scan - timers.now == traffic.SCAN_INTERVALS[0]
    for _ in range(6):
        timers.now = node.next_scan + 1
        timers.fire()
    pids[1] = start("input()").pid  # a worker that starts when others have run for long
    timers.now += 1
    timers.fire()
    assert node.next_scan - timers.now == traffic.SCAN_INTERVALS[0]
    timers.now += 100.0
    node.took = 2.0  # the machine has very many connections
    node._wait()
    assert timers.waiting.pop()[0] == 2.0 / traffic.MAX_LOAD
    pids.clear()
    timers.fire()
    assert not timers.waiting
    node.start()
    assert len(timers.waiting) == 1


def test_a_system_that_does_not_report_connections_must_leave_use_unknown(monkeypatch):
    timers = Timers()
    monkeypatch.delattr(socket, "AF_NETLINK")  # as on macOS
    node = Traffic(timers, lambda: {0: os.getpid()})
    node.start()
    for _ in range(traffic.MAX_FAILURES):
        timers.fire()
    assert node.use(0) is None and not timers.waiting


@pytest.mark.parametrize("error", [TimeoutError(), struct.error(), TypeError()])
def test_failed_samples_must_not_end_sampling_once_one_has_succeeded(monkeypatch, start, error):
    def fail():
        raise error

    timers, worker = Timers(), start("input()")
    node = Traffic(timers, lambda: {0: worker.pid})
    node.start()
    timers.fire()
    with monkeypatch.context() as patch:
        patch.setattr(traffic, "connections", fail)
        for _ in range(traffic.MAX_FAILURES):
            timers.fire()
    assert node.use(0) and timers.waiting


@pytest.mark.parametrize(
    ("versions", "known"),
    [(["2.9.1+cu130"], "2.9.1+cu130"), (["2.9\n1"], ""), (["2" * 41], ""), (["2.9.1", "2.9.0"], ""), ([], "")],
)
def test_an_open_gpu_and_a_loaded_torch_must_be_seen(monkeypatch, start, tmp_path, versions, known):
    packages = tmp_path / "site-packages"
    device, library = tmp_path / "nvidia0", packages / "torch" / "lib" / "libtorch_cpu.so"
    device.touch()
    library.parent.mkdir(parents=True)
    (packages / "torchvision-0.30.0.dist-info").touch()
    for name in versions:
        (packages / f"torch-{name}.dist-info").touch()
    library.write_bytes(b"x" * 4096)
    code = (
        "import mmap, sys\nfile, library = open(sys.argv[1]), open(sys.argv[2], 'r+b')\n"
        "mapped = mmap.mmap(library.fileno(), 0)\nprint(1, flush=True)\n"
        "input()\nfile.close()\nmapped.close()\nprint(2, flush=True)\ninput()"
    )
    worker = start(code, str(device), str(library))
    assert line(worker) == "1"
    monkeypatch.setattr(traffic, "GPU_FILES", (str(tmp_path / "nvidia"),))
    node = Traffic(Timers(), lambda: {0: worker.pid})
    while not (use := node.use(0)) or not use.sampled:
        node.sample()
    assert use.gpu and use.torch and use.version == known and use.exchanged == use.connected == 0
    print(file=worker.stdin, flush=True)
    assert line(worker) == "2"
    node.next_scan = 0.0
    node.sample()
    later = node.use(0)
    assert later and later.gpu and later.torch and later.version == known  # they were used
