"""Workers must reach their peers and the outside, but not this machine; on a real engine."""

import errno
import json
import os
import re
import shutil
import socket
import subprocess
import threading
from pathlib import Path

import pytest
from support.faults import Background
from support.leftovers import docker
from support.namespaces import Space, command, possible
from support.optional import not_none
from support.waiting import eventually

from orchestrate.engines.docker import guard, labels
from orchestrate.engines.docker.client import Daemon
from orchestrate.node.programs import guard as program
from orchestrate.spec.spec import IMAGE

pytestmark = pytest.mark.docker
GUARDED = {"EHOSTUNREACH", "ENETUNREACH"}
OPTIONS = ("--gpus", "none", "--set", "grace=5s")
FILTERED = ("--set", "host_access=false")  # unlike other tests


class Surroundings:
    """The surroundings of a node: this machine, and one outside that also plays the cloud's metadata service."""

    def __init__(self) -> None:
        pid = os.getpid()
        block, self.metadata = f"198.18.{pid >> 6 & 255}", f"169.254.{pid >> 8 & 127}.{pid & 255}"
        here, self.outside = (f"{block}.{(pid & 63) * 4 + number}" for number in (1, 2))
        self.space = Space((f"{here}/30",), (f"{self.outside}/30", f"{self.metadata}/32"))
        try:
            self.connect(here)
        except BaseException:
            self.space.remove()
            raise

    def connect(self, here: str) -> None:
        """Set up routes in both directions and listen at both ends; `here` is this machine's address on that link."""
        self.space.run("ip", "route", "add", "default", "via", here)
        command("ip", "route", "add", self.metadata, "via", self.outside)
        self.tcp = socket.create_server(("0.0.0.0", 0))
        self.port = self.tcp.getsockname()[1]
        self.udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.udp.bind(("0.0.0.0", self.port))
        self.udp.setblocking(False)
        for address in (self.outside, self.metadata):
            self.space.listen(address, self.port)
        lan = json.loads(command("ip", "-json", "route", "get", "198.51.100.1"))[0]["prefsrc"]
        bridge = json.loads(docker("network", "inspect", "bridge"))[0]["IPAM"]["Config"][0]["Gateway"]
        self.here = ["gateway", bridge, lan, here]

    def places(self, *ways: str) -> list[str]:
        """This machine, at each of its addresses, and the metadata service."""
        return [f"{way}:{host}:{self.port}" for way in ways for host in (*self.here, self.metadata)]

    def received(self) -> bool:
        """Whether a datagram has reached this machine."""
        try:
            return self.udp.recv(100) == b"reached"
        except BlockingIOError:
            return False

    def remove(self) -> None:
        self.tcp.close()
        self.udp.close()
        self.space.remove()


@pytest.fixture(scope="module")
def around(docker_engine):
    possible()
    surroundings = Surroundings()
    yield surroundings
    surroundings.remove()


@pytest.fixture
def helped(cli):
    """Commands of root cannot enter the namespaces of nodes, as those of other users, and need helper containers."""
    cli.prefix = ["setpriv", "--bounding-set", "-sys_admin"] if os.geteuid() == 0 else []


@pytest.fixture
def reach(cli):
    """Run a job that tries to reach places; return the results by rank."""

    def run(*places: str, options: tuple[str, ...] = (), trainers: int = 1) -> list[dict[str, str]]:
        for old in cli.folder.glob("runs/*"):
            if not (old / "nodes").exists():
                shutil.rmtree(old)
        job = ("run", "--engine", "docker", "--trainers", str(trainers), *OPTIONS, *options)
        done = cli(*job, "--", "reach.py", *places)
        assert done.returncode == 0, done.stderr
        assert "warning" not in done.stderr
        return [json.loads(cli.log(rank)) for rank in range(trainers + 1)]

    return run


@pytest.mark.parametrize("way", ["root", "helped"])
def test_workers_must_reach_the_outside_but_not_this_machine_or_the_metadata_service(
    around, reach, nothing_left, way, request
):
    if way == "helped":
        request.getfixturevalue(way)
    blocked, open_ = around.places("tcp", "bind"), [f"tcp:{around.outside}:{around.port}"]
    near = f"near:gateway:{around.port}"
    datagrams = [f"udp:{host}:{around.port}" for host in (*around.here, "subnet", "255.255.255.255", "224.0.0.1")]
    for found in reach(*blocked, near, *open_, *datagrams):
        assert {found[place] for place in [*blocked, near]} <= GUARDED, found
        assert {found[place] for place in open_} == {"reached"}
        assert {found[place] for place in datagrams} <= GUARDED | {"EPERM"}
    assert not around.received()


def test_workers_must_reach_everything_with_host_access(around, reach, nothing_left):
    places = [*around.places("tcp"), f"udp:subnet:{around.port}", f"tcp:{around.outside}:{around.port}"]
    for found in reach(*places, options=("--set", "host_access=true")):
        assert set(found.values()) == {"reached"}
    assert around.received()
    while around.received():
        pass


def test_a_restarted_node_must_be_filtered_before_it_starts_a_worker(cli, around, nothing_left):
    (cli.folder / "stay").touch()
    job = Background(cli, "docker", *FILTERED, "--", "reach.py", *around.places("tcp"), trainers=1)
    eventually(lambda: all(job.has(rank, "}\n") for rank in range(2)) or job.ended_early())
    docker("restart", "--time", "0", job.node("trainer-1"))
    assert job.end() == 0, job.err
    assert len(job.events("generation_started")) == 2
    for rank in range(2):
        found = [json.loads(line) for line in re.findall(r"^\{.*", cli.log(rank), re.M)]
        assert len(found) == 2 and {value for one in found for value in one.values()} <= GUARDED


def test_nodes_of_a_cluster_must_be_filtered_once_for_all_jobs(cli, helped, around, reach, nothing_left):
    done = cli("up", "--engine", "docker", "--trainers", "1", *OPTIONS, "--set", "warm=false")
    name = done.stdout.strip()
    helpers = ["--filter", f"label={labels.GUARD}={name}"]
    for _ in range(10):  # other tests may add an address to this machine, which starts a helper
        reach(*around.places("tcp"))  # blocks addresses that were added since `up`
        since = docker("info", "--format", "{{.SystemTime}}").strip()
        for _ in range(2):
            for found in reach(*around.places("tcp")):
                assert set(found.values()) <= GUARDED
        until = docker("info", "--format", "{{.SystemTime}}").strip()
        if not (ran := docker("events", "--since", since, "--until", until, *helpers)):
            break
    assert ran == ""
    assert docker("ps", "--all", "--quiet", *helpers) == ""
    node = docker("ps", "--quiet", "--filter", f"name={name}-master").strip()
    docker("restart", "--time", "0", node)
    for found in reach(*around.places("tcp")):
        assert set(found.values()) <= GUARDED
    assert cli("down", name).returncode == 0


REMOVE_FILTER = """
import sys
sys.path.insert(0, "/opt/orchestrate/node/programs")
import guard
head, table = guard.struct.pack("=BBH", guard.IPV4, 0, 0), guard.text(1, guard.NAME)
guard.send(guard.NETFILTER, [
    guard.message(guard.BEGIN, 0, guard.struct.pack(">BBH", 0, 0, 10)),
    guard.message(guard.DELETE_TABLE, guard.ACK, head, table),
    guard.message(guard.END, 0, guard.struct.pack(">BBH", 0, 0, 10)),
])
"""


@pytest.fixture
def guarded_node(request, cli, nothing_left, docker_engine):
    """The container of a running node with a packet filter."""
    done = cli(
        "up", "--engine", "docker", "--trainers", "0", *OPTIONS, "--set", "warm=false", *getattr(request, "param", ())
    )
    name = done.stdout.strip()
    yield docker("ps", "--quiet", "--filter", f"name={name}-master").strip()
    assert cli("down", name).returncode == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can enter a namespace")
def test_root_must_set_up_a_filter_only_in_the_namespace_of_the_container(docker_engine, tmp_path):
    container = docker(
        "run", "--detach", "--label", f"orchestrate.run={tmp_path}/", "--entrypoint", "sleep", IMAGE, "99"
    )
    identity, routes = container.strip(), Path("/proc/net/route").read_text()
    try:
        pid = int(docker("inspect", "--format", "{{.State.Pid}}", identity))
        arguments = [Path(program.__file__).read_text(), "7", "dns:", "10.99.0.1/255.255.255.255"]
        for other in ("0" * 64, identity[1:], identity[:-1]):
            assert not guard.entered(other, pid, arguments)
        assert not guard.entered(identity, os.getpid(), arguments)
        assert not guard.entered(identity, pid, [*arguments[:2], "no/mask"]) and not guard.marked(pid, 7)
        assert not guard.entered(identity, pid, ["pass", *arguments[1:]])  # leaves no mark
        assert guard.entered(identity, pid, arguments) and guard.marked(pid, 7)
        assert Path("/proc/net/route").read_text() == routes
    finally:
        docker("rm", "--force", identity)


@pytest.mark.parametrize("user", ["0:0", "1000:1000"])
def test_the_filter_must_not_be_removable_from_within_a_node(guarded_node, user):
    command = ["docker", "exec", "--user", user, guarded_node, "python", "-c", REMOVE_FILTER]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.endswith("PermissionError: [Errno 1] Operation not permitted\n")
    privileged = ["docker", "exec", "--privileged", "--user", "0:0", guarded_node, "python", "-c", REMOVE_FILTER]
    assert subprocess.run(privileged, capture_output=True).returncode == 0  # the same program works with privileges


@pytest.mark.parametrize("guarded_node", [(), ("--set", "host_access=true")], ids=["default", "open"], indirect=True)
def test_users_of_this_machine_must_reach_a_node_only_with_host_access(guarded_node, request):
    listens = "import socket; socket.create_server(('0.0.0.0', 45999)).accept()[0].sendall(b'answer')"
    docker("exec", "--detach", guarded_node, "python", "-c", listens)
    network = json.loads(docker("inspect", guarded_node))[0]["NetworkSettings"]["Networks"]
    (address,) = (one["IPAddress"] for one in network.values())

    def answer() -> bytes:
        try:
            with socket.create_connection((address, 45999)) as sock:
                return sock.recv(100)
        except ConnectionRefusedError:  # the server does not listen yet
            return b""
        except OSError as error:
            return errno.errorcode[not_none(error.errno)].encode()

    assert eventually(answer) == (b"answer" if "open" in request.node.name else b"EHOSTUNREACH")


# --- failures of the helper container


@pytest.fixture
def hanging(cli, helped):
    """A job with one node, and its helper container, which hangs until it is killed."""
    (cli.folder / "hang.py").write_text("import signal\nsignal.pause()\n")
    patch = f"from orchestrate.node.programs import guard\nguard.__file__ = '{cli.folder}/hang.py'\n"
    (cli.folder / "patch").mkdir()
    (cli.folder / "patch" / "sitecustomize.py").write_text(patch)
    cli.env["PYTHONPATH"] = f"{cli.folder}/patch:{cli.env['PYTHONPATH']}"
    job = Background(cli, "docker", *FILTERED, "--", "probe.py", trainers=0)
    job.until("nodes_up")
    found = ["ps", "--quiet", "--filter", f"label={labels.GUARD}={job.project()}"]
    return job, eventually(lambda: docker(*found).strip() or job.ended_early())


def test_a_job_whose_helper_container_is_killed_must_continue_with_a_warning(nothing_left, docker_engine, hanging):
    job, helper = hanging
    assert not job.events("generation_started")
    docker("kill", helper)
    assert job.end() == 0
    (line,) = (line for line in job.err.splitlines() if line.startswith("warning"))
    assert line.startswith("warning: the nodes can reach this machine's ports") and "exit code 137" in line


def test_helper_containers_of_a_killed_orchestrator_must_be_removed(nothing_left, docker_engine, cli, hanging):
    job, helper = hanging
    job.process.kill()
    job.end()
    name = docker("inspect", "--format", "{{.Name}}", helper).strip().lstrip("/")
    assert f"container {name}\n" in cli("stop", "--dry-run", job.project()).stdout
    done = cli("stop", job.project())
    assert done.returncode == 0, done.stderr


def test_a_node_that_was_disconnected_must_still_be_filtered(around, guarded_node):
    (network,) = json.loads(docker("inspect", guarded_node))[0]["NetworkSettings"]["Networks"]
    places = [f"tcp:gateway:{around.port}", f"tcp:{around.outside}:{around.port}"]
    docker("network", "disconnect", network, guarded_node)
    docker("network", "connect", network, guarded_node)
    found = json.loads(docker("exec", guarded_node, "python", "/workspace/reach.py", *places))
    assert found[places[0]] in GUARDED and found[places[1]] == "reached"


# --- name resolution


def answer(question: bytes) -> bytes:
    """A DNS answer that resolves any name to 192.0.2.7."""
    query = question[12:].partition(b"\0")[0] + question[12 + len(question[12:].partition(b"\0")[0]) :][:5]
    record = b"\xc0\x0c\0\1\0\1\0\0\0\x3c\0\4" + bytes([192, 0, 2, 7])
    return question[:2] + b"\x81\x80\0\1\0\1\0\0\0\0" + query + record


@pytest.fixture
def names(around):
    """A name server on this machine, at an address that nodes cannot reach; yields the address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind((around.here[-1], 53))

        def serve() -> None:
            while question := server.recvfrom(1000):
                server.sendto(answer(question[0]), question[1])
                if question[0] == b"end":
                    return

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield around.here[-1]
        server.sendto(b"end", server.getsockname())
        thread.join()


def test_names_must_be_resolved_by_a_name_server_on_this_machine(names, tmp_path, nothing_left):
    network, label = f"names-{os.getpid()}", f"orchestrate.run={tmp_path}/"
    docker("network", "create", "--label", label, network)
    options = ("--network", network, "--dns", names, "--cap-drop", "ALL", "--label", label)
    node = docker("run", "--detach", *options, "--entrypoint", "sleep", IMAGE, "1000").strip()
    daemon = Daemon()
    helpers = guard.Guard(daemon, network, tmp_path, [])
    try:
        nodes = dict(zip(["master"], daemon.containers(label)))
        helpers.begin(nodes.values())
        helpers.finish(lambda: nodes)
        assert helpers.warnings() == []
        resolve = "import socket; print(socket.gethostbyname('a.example'))"
        assert docker("exec", node, "python", "-c", resolve) == "192.0.2.7\n"
    finally:
        helpers.close()
        docker("rm", "--force", node)
        docker("network", "rm", network)
