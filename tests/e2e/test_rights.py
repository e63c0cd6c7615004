"""The rights of nodes of a running job, checked against two public lists.

`5.N` are the checks of docker-bench-security, section 5 (container runtime, of the CIS Docker Benchmark), `owasp-N` the
rules of OWASP's Docker Security Cheat Sheet. Its rules 0, 10 and 11 (up-to-date engine, its log, rootless mode) concern
the machine; 9 and 13 (building the image) are tested in test_project.py. If we use another mechanism than a check
expects, a comment names it.
"""

import json
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from docker import DockerClient
from support.cli import Cli
from support.faults import Background
from support.leftovers import docker, leftovers
from support.waiting import eventually

from orchestrate.host import users
from orchestrate.spec.spec import IMAGE, JobSpec

pytestmark = pytest.mark.docker
CANARY = "a-value-that-only-the-worker-may-see"
INSPECT = """
import json, os, pathlib, resource, socket, stat, time

def lines(path):
    return pathlib.Path(path).read_text().splitlines()

def writable(folder):
    try:
        (pathlib.Path(folder) / f"written-by-{os.getpid()}").touch()
    except OSError:
        return False
    return True

def changeable():
    # The writable folders and regular files of the whole container, without the content of writable folders.
    found = []
    for root, folders, names in os.walk("/"):
        for name in [*folders]:
            path = os.path.join(root, name)
            if path in ("/proc", "/sys") or os.path.islink(path):
                folders.remove(name)
            elif os.access(path, os.W_OK):
                found.append(path)
                folders.remove(name)
        paths = [os.path.join(root, name) for name in names]
        files = [path for path in paths if os.path.isfile(path) and not os.path.islink(path)]
        found += [path for path in files if os.access(path, os.W_OK)]
    return sorted(found)

def refusal(folder):
    # The reason why no device can be created in a folder; empty if one can.
    try:
        os.mknod(f"{folder}/device-{os.getpid()}", stat.S_IFCHR | 0o600, os.makedev(1, 3))
    except OSError as error:
        return error.strerror
    return ""

def users(kind):
    # The user or group ids of the processes in the node.
    status = [path.read_text().splitlines() for path in pathlib.Path("/proc").glob("[0-9]*/status")]
    return sorted({int(word) for line in sum(status, []) if line.startswith(kind) for word in line.split()[1:]})

address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if os.environ["RANK"] == "0":
    server = socket.create_server(("", address[1]))
while os.environ["RANK"] == "1":
    try:
        socket.create_connection(address).close()
        break
    except OSError:
        time.sleep(0.05)
places = [line.split()[4] for line in lines("/proc/self/mountinfo")]
OWN = ["0B00007F"]  # Docker's own DNS
status = int(os.environ.get("KUBEFLOW_TRAINER_SERVER_URL", ":0").strip("/").rpartition(":")[2])
listening = [line.split()[1].split(":") for line in lines("/proc/net/tcp") + lines("/proc/net/tcp6") if " 0A " in line]
folders = ("/", "/dev", "/etc", "/proc", "/sys", "/usr", "/root", "/home", "/var/tmp", "/run", "/opt", *places)
print(json.dumps({
    "status": dict(line.split(":", 1) for line in lines("/proc/self/status")),
    "mounts": {line.split()[4]: line.split()[5].split(",") for line in lines("/proc/self/mountinfo")},
    "sizes": {place: os.statvfs(place).f_blocks * os.statvfs(place).f_frsize for place in ("/tmp", "/dev/shm")},
    "processes": [path.read_text().split("(")[1].split(")")[0] for path in pathlib.Path("/proc").glob("[0-9]*/stat")],
    "listening": [int(port, 16) for host, port in listening if host not in OWN and int(port, 16) != status],
    "blocks": [path.name for path in pathlib.Path("/dev").iterdir() if stat.S_ISBLK(path.stat().st_mode)],
    "writable": sorted({place for place in folders if os.path.isdir(place) and writable(place)}),
    "changeable": changeable(),
    "refusals": {place: refusal(place) for place in changeable()},
    "users": [users("Uid:"), users("Gid:"), users("Groups:")],
    "sockets": [str(path) for path in pathlib.Path("/").glob("*/**/docker.sock")],
    "oom": int(lines("/proc/self/oom_score_adj")[0]),
    "core": resource.getrlimit(resource.RLIMIT_CORE),
    "env": dict(os.environ),
}), flush=True)
while not os.path.exists("/job/finish"):
    time.sleep(0.05)
"""
# Docker removes the rule that isolates its networks, for milliseconds, whenever it creates one, as other tests do: one
# attempt may succeed.
CONNECT = """
import socket, sys, time
codes = []
for _ in range(3):
    with socket.socket() as s:
        s.settimeout(2)
        codes.append(s.connect_ex((sys.argv[1], int(sys.argv[2]))))
    time.sleep(0.2)
print(codes.count(0) > 1)
"""


@dataclass
class Node:
    """A node, as described by the engine and as seen by its worker."""

    job: str
    limits: dict[str, int]  # of the plan
    engine: dict[str, Any]  # docker info
    container: dict[str, Any]  # docker inspect
    inside: dict[str, Any]
    execs: list[dict[str, Any]]  # other processes that the engine runs in it
    reached: bool  # whether a container on another network can connect to it

    @property
    def host(self) -> dict[str, Any]:
        return self.container["HostConfig"]

    @property
    def options(self) -> list[str]:
        return self.host["SecurityOpt"]

    @property
    def networks(self) -> dict[str, Any]:
        return self.container["NetworkSettings"]["Networks"]

    @property
    def mounts(self) -> list[dict[str, Any]]:
        return self.container["Mounts"]

    def has(self, module: str) -> bool:
        """Whether the engine's kernel provides a security module."""
        return any(f"name={module}" in option for option in self.engine["SecurityOptions"])

    def capabilities(self) -> set[int]:
        return {int(self.inside["status"][f"Cap{kind}"], 16) for kind in ("Inh", "Prm", "Eff", "Bnd", "Amb")}


def connects(address: str, port: str, run: str) -> bool:
    """Whether a container on Docker's default network reaches an address."""
    args = ("run", "--rm", "--label", f"orchestrate.run={run}", "--network", "bridge", "--entrypoint", "python", IMAGE)
    return docker(*args, "-c", CONNECT, address, port) == "True\n"


def exec_config(exec_id: str) -> dict[str, Any]:
    """The configuration of an exec: user, privileges and command."""
    engine = DockerClient.from_env()
    try:
        return {"user": "", **engine.api.exec_inspect(exec_id)["ProcessConfig"]}
    finally:
        engine.close()


@pytest.fixture(scope="module")
def looked_at(docker_engine, tmp_path_factory):
    """The master and a trainer of a job."""
    cli = Cli(tmp_path_factory.mktemp("rights"))
    (cli.folder / "look.py").write_text(INSPECT)
    job = Background(cli, "docker", "--set", f"env.TOKEN={CANARY}", "--", "look.py", trainers=1)
    try:
        found = []
        job.until("generation_started")
        plan = json.loads((cli.run_dir() / "plan.json").read_text())
        for rank, name in enumerate(plan["nodes"]):
            eventually(lambda rank=rank: job.has(rank, "}\n") or job.ended_early())
            (container,) = json.loads(docker("inspect", job.node(name)))
            inside, engine = json.loads(cli.log(rank)), json.loads(docker("info", "--format", "{{json .}}"))
            (address,) = (one["IPAddress"] for one in container["NetworkSettings"]["Networks"].values())
            reached = connects(address, plan["workers"][0]["env"]["MASTER_PORT"], str(cli.run_dir()))
            execs = [exec_config(one) for one in container["ExecIDs"] or ()]
            found.append(Node(job.project(), plan["limits"], engine, container, inside, execs, reached))
        cli.finish_jobs()
        assert job.end() == 0, job.err
    finally:
        cli.clean()
    yield found
    assert leftovers(cli.folder) == {}


Check = Callable[[Node], tuple[Any, Any]]  # the found and the expected value
OWNER = users.nodes_of(JobSpec().user) or (os.geteuid(), os.getegid())
IN_MEMORY = ("/dev/mqueue", "/dev/shm", "/run/secrets", "/tmp")  # the engine creates the first, of 800 kB
WRITABLE = tuple(sorted((*IN_MEMORY, "/job", "/run/orchestrate")))
SENSITIVE = ("/boot", "/dev", "/etc", "/lib", "/proc", "/sys", "/usr")
CHECKS: dict[str, Check] = {
    "5.1 no Swarm if not needed": lambda node: (
        [label for label in node.container["Config"]["Labels"] if "swarm" in label],
        [],
    ),
    "5.2 AppArmor if the kernel has it": lambda node: (
        node.container["AppArmorProfile"],
        "docker-default" if node.has("apparmor") else "",
    ),
    "5.3 SELinux if the kernel has it": lambda node: (
        (bool(node.container["ProcessLabel"]), [option for option in node.options if option.startswith("label")]),
        (node.has("selinux"), []),
    ),
    "5.4 owasp-3 no capabilities": lambda node: (
        (node.host["CapDrop"], node.host["CapAdd"], node.capabilities()),
        (["ALL"], None, {0}),
    ),
    "5.5 not privileged": lambda node: (node.host["Privileged"], False),
    "5.6 no system folders mounted": lambda node: (
        [one["Source"] for one in node.mounts if f"{one['Source']}/".startswith(("//", *(f"{s}/" for s in SENSITIVE)))],
        [],
    ),
    "5.7 no sshd": lambda node: ([name for name in node.inside["processes"] if "ssh" in name], []),
    "5.8 no privileged port published": lambda node: (node.host["PortBindings"], {}),
    "5.9 only the port of rank 0 open": lambda node: (
        (node.inside["listening"], node.container["NetworkSettings"]["Ports"]),
        ([29500] if node.inside["env"]["RANK"] == "0" else [], {}),
    ),
    "5.10 not the host's network": lambda node: (node.host["NetworkMode"], f"{node.job}_job"),
    "5.11 limited memory": lambda node: (
        (node.host["Memory"], node.host["Memory"] > 0),
        (node.limits["memory"], True),
    ),
    "5.12 lower CPU priority": lambda node: (node.host["CpuShares"], 512),
    "5.13 read-only root file system": lambda node: (node.host["ReadonlyRootfs"], True),
    "5.14 no traffic from outside": lambda node: (node.host["PublishAllPorts"], False),  # nor any port, see 5.8
    "5.15 no restarts by the engine": lambda node: (  # but by the supervisor: the whole gang, within the budget
        node.host["RestartPolicy"],
        {"Name": "no", "MaximumRetryCount": 0},
    ),
    "5.16 not the host's process namespace": lambda node: (node.host["PidMode"], ""),
    "5.17 not the host's shared memory": lambda node: (node.host["IpcMode"] in ("private", "shareable"), True),
    "5.18 no devices": lambda node: (
        (node.host["Devices"], node.host["DeviceRequests"], node.host["DeviceCgroupRules"], node.inside["blocks"]),
        (None, None, None, []),
    ),
    "5.19 no core dumps": lambda node: (
        (node.host["Ulimits"], node.inside["core"]),
        ([{"Name": "core", "Hard": 0, "Soft": 0}], [0, 0]),
    ),
    "5.20 private mount propagation": lambda node: ({one["Propagation"] for one in node.mounts} - {""}, {"rprivate"}),
    "5.21 not the host's UTS namespace": lambda node: (node.host["UTSMode"], ""),
    "5.22 the default seccomp profile": lambda node: (
        ([option for option in node.options if "seccomp" in option], node.inside["status"]["Seccomp"].strip()),
        ([], "2"),
    ),
    "5.23 no privileged exec": lambda node: (  # nodes are reached over their sockets, or by an exec if these are late
        [one for one in node.execs if one["privileged"]],
        [],
    ),
    "5.24 no exec as root": lambda node: ([one for one in node.execs if one["user"]], []),  # but as the node's user
    "5.25 the engine's default cgroup": lambda node: (node.host["CgroupParent"], ""),
    "a private cgroup namespace": lambda node: (node.host["CgroupnsMode"], "private"),
    "5.26 owasp-4 no new privileges": lambda node: (
        ("no-new-privileges:true" in node.options, node.inside["status"]["NoNewPrivs"].strip()),
        (True, "1"),
    ),
    "5.27 no health check by the engine": lambda node: (  # but by the supervisor, over the connection to each node
        (node.container["Config"].get("Healthcheck"), node.container["State"].get("Health")),
        ({"Test": ["NONE"]}, None),
    ),
    "5.28 an image with a version tag": lambda node: (
        node.container["Config"]["Image"],
        IMAGE,
    ),  # it is never pulled again
    "5.29 limited processes": lambda node: (node.host["PidsLimit"], node.limits["processes"]),
    "5.30 not the default bridge": lambda node: ([*node.networks], [f"{node.job}_job"]),
    "5.31 not the host's users if the engine remaps them": lambda node: (node.host["UsernsMode"], ""),
    "5.32 owasp-1 no Docker socket": lambda node: (
        ([one for one in node.mounts if "docker.sock" in one["Source"]], node.inside["sockets"]),
        ([], []),
    ),
    "owasp-2 a user other than root, in no other group": lambda node: (
        (node.container["Config"]["User"], node.inside["users"], 0 in OWNER),
        (f"{OWNER[0]}:{OWNER[1]}", [[OWNER[0]], [OWNER[1]], [OWNER[1]]], False),
    ),
    "owasp-5 no connections from other networks": lambda node: (node.reached, False),  # rank 1 can connect to rank 0
    "owasp-6 no disabled security module": lambda node: (node.options, ["no-new-privileges:true"]),
    "owasp-7 no swap, and first to be OOM-killed": lambda node: (
        (node.host["MemorySwap"], node.host["OomScoreAdj"], node.inside["oom"], node.inside["sizes"]),
        (node.limits["memory"], 500, 500, {"/tmp": math.ceil(node.limits["tmp"] / 4096) * 4096, "/dev/shm": 1 << 30}),
    ),
    "owasp-8 few writable places": lambda node: (
        (node.inside["changeable"], node.inside["writable"]),
        ([*WRITABLE], [*WRITABLE]),
    ),
    "owasp-8 no device files in writable places": lambda node: (
        node.inside["refusals"],
        dict.fromkeys(WRITABLE, "Operation not permitted"),
    ),
    "owasp-8 nosuid and nodev in memory": lambda node: (
        [{"nosuid", "nodev"} - set(node.inside["mounts"][place]) for place in IN_MEMORY],
        [set()] * len(IN_MEMORY),
    ),
    "owasp-12 no environment values known to the engine": lambda node: (
        (CANARY in json.dumps(node.container), node.inside["env"]["TOKEN"]),
        (False, CANARY),
    ),
}


@pytest.mark.parametrize("name", CHECKS)
def test_a_node_must_pass_the_check(looked_at, name):
    for node in looked_at:
        found, expected = CHECKS[name](node)
        assert found == expected


def test_every_check_of_the_lists_must_be_covered():
    names = " ".join(CHECKS)
    assert re.findall(r"\b5\.(\d+)", names) == [str(number) for number in range(1, 33)]
    assert set(re.findall(r"owasp-(\d+)", names)) == {"1", "2", "3", "4", "5", "6", "7", "8", "12"}
