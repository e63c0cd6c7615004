"""Packet filter that keeps nodes from this machine's ports and the metadata service, and others from the nodes.

Nodes have no capabilities, so `node/programs/guard.py` sets up the filter from outside, while nodes import torch;
workers start only after that. As root on the engine's machine, a process of ours enters a node's network namespace;
otherwise a helper container does, which takes longer. A helper has a capability and its result is trusted,
so it runs in the project's image, never in the job's.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_interface, ip_network
from pathlib import Path
from typing import Any

from orchestrate.engines.docker import helper_containers, labels
from orchestrate.engines.docker.api import Container, errors, socket_of
from orchestrate.engines.docker.client import Daemon
from orchestrate.errors import EngineError
from orchestrate.files.folder import regular
from orchestrate.node.programs import guard as program
from orchestrate.node.trees import FOLDER
from orchestrate.spec.spec import JobSpec

log = logging.getLogger(__name__)

HELPER_TIMEOUT = 30  # seconds for a helper to finish
MEMORY, PROCESSES = 64 << 20, 8  # limits of a helper
RUNTIMES = ("runc", "crun", "nvidia")  # whose nodes use this machine's kernel
MAX_NAMES = 64 << 10  # bytes of a resolv.conf
METADATA = (
    "169.254.0.0/16",  # most clouds
    "100.100.100.200/32",  # Alibaba
    "168.63.129.16/32",  # Azure
    "192.0.0.192/32",  # Oracle
    "fd00:ec2::/32",  # AWS
    "fd20:ce::/32",  # Google
)
NEIGHBOURS = ("224.0.0.0/3", "fe80::/10", "ff00::/8")  # broadcast, multicast and link-local, which reach this machine
POOLS: list[dict[str, Any]] = [  # Docker's default address pools
    {"Base": "172.16.0.0/12", "Size": 16},
    {"Base": "192.168.0.0/16", "Size": 20},
]
PROC = Path("/proc")
# Runs a program, as its second argument, in the network namespace with the descriptor in the first one.
ENTER = """
import ctypes, os, sys
if ctypes.CDLL(None, use_errno=True).setns(int(sys.argv.pop(1)), 0x40000000):  # CLONE_NEWNET of linux/sched.h
    sys.exit(os.strerror(ctypes.get_errno()))
exec(sys.argv.pop(1))
"""

Address = IPv4Address | IPv6Address
Pattern = tuple[Address, Address]  # an address and its mask


class Guard:
    """The helper containers of one job's nodes."""

    def __init__(self, daemon: Daemon, project: str, run: Path, ports: Iterable[str]) -> None:
        """`project` is the job or cluster that owns the nodes, and `run` the folder that is mounted in them.

        This machine can reach the master's `ports`, as `HERE:THERE`.
        """
        self.daemon, self.project, self.run = daemon, project, run
        self.open = [f"tcp:{pair.rpartition(':')[2]}" for pair in ports]
        self.pool = ThreadPoolExecutor(16)
        self.begun: dict[str, Future[None]] = {}  # by endpoint id, which changes whenever a container starts
        self.ended: set[str] = set()  # endpoints whose helper has finished
        self.failures: list[str] = []
        self.warned = False

    def begin(self, nodes: Iterable[Container]) -> None:
        """Start a helper for each node that has had none since its start."""
        for node in nodes:
            if _endpoint(node) not in self.begun:
                self.begun[_endpoint(node)] = self.pool.submit(self._protect, node)

    def finish(self, look: Callable[[], dict[str, Container]]) -> None:
        """Wait for the helpers; `look` returns the running nodes, and starts helpers for restarted ones.

        A restarted node has a new namespace, so its caller has looked before.
        """
        while new := self.begun.keys() - self.ended:
            wait([self.begun[endpoint] for endpoint in new])
            self.ended |= new
            running = new & {_endpoint(node) for node in look().values()}  # ended nodes need no filter
            self.failures += [str(error) for endpoint in running if (error := self.begun[endpoint].exception())]

    def expects(self, node: Container) -> bool:
        """Whether workers on a node must wait for the filter: not if setting it up failed."""
        begun = self.begun.get(_endpoint(node))
        return begun is None or not begun.done() or begun.exception() is None

    def warnings(self) -> list[str]:
        """Return a warning, only once, if nodes are not protected."""
        if self.warned or not self.failures:
            return []
        self.warned = True
        return [
            "the nodes can reach this machine's ports and the cloud's metadata service: the packet filter could not "
            f"be set up: {self.failures[0]} (to allow this, set host_access: true)"
        ]

    def close(self) -> None:
        """Wait for running helpers, and cancel others."""
        self.pool.shutdown(cancel_futures=True)

    def _protect(self, node: Container) -> None:
        """Set up the filter, unless an earlier orchestrator has set up the same one."""
        with self.daemon.translating_errors("could not run a helper container"):
            facts = self.daemon.api.get(f"/containers/{node.id}/json")
            pid = facts["State"]["Pid"]
            source = Path(program.__file__).read_text()
            words = [f"{value}/{mask}" for value, mask in blocked(self.daemon.info, node)]
            words += [f"net:{value}/{mask}" for value, mask in networks(node)]
            words += self.open if labels.node(node) == "master" else []
            mark = zlib.crc32("\n".join([source, *words]).encode()) >> 1  # the kernel prints it as a signed number
            if marked(pid, mark):
                return
            with contextlib.suppress(OSError):  # for example, in a container with the engine's socket
                if self._may_enter(facts) and entered(node.id, pid, [source, str(mark), _servers(facts), *words]):
                    return
            self._run_helper(node.id, ["python", "-I", "-S", "-c", source, str(mark), *words])

    def _may_enter(self, inspected: dict[str, Any]) -> bool:
        """Whether this process may act on what the engine says: it is root, as whom the engine runs on this machine.

        The engine of another account could name any process. The network of a node in a sandbox is not the kernel's.
        Raises OSError.
        """
        socket = socket_of(self.daemon.host)
        ours = bool(socket) and not os.geteuid() and not os.stat(socket).st_uid
        return ours and inspected.get("HostConfig", {}).get("Runtime") in RUNTIMES

    def _run_helper(self, node: str, command: list[str]) -> None:
        helper = helper_containers.create(
            self.daemon,
            labels.helper_name(labels.GUARD, self.project, secrets.token_hex(4)),
            MEMORY,
            PROCESSES,
            {"NetworkMode": f"container:{node}", "CapAdd": ["NET_ADMIN"]},
            {
                "Entrypoint": command,
                "User": "0:0",
                "Env": ["NVIDIA_VISIBLE_DEVICES=void"],
                "Labels": labels.only({labels.GUARD: self.project, labels.RUN: str(self.run)}),
            },
        )
        try:
            if code := helper_containers.run(self.daemon, helper, HELPER_TIMEOUT):
                last = self.daemon.api.output(helper, stdout=1, stderr=1, tail=1).decode(errors="replace").strip()
                raise EngineError(last or f"the helper container failed with exit code {code}")
        finally:
            with contextlib.suppress(*errors()):  # a leftover helper is removed with the nodes
                self.daemon.api.remove(helper)


def entered(container: str, pid: int, arguments: list[str]) -> bool:
    """Run a program in the network namespace of a container's process; return whether that has left its mark there.

    `arguments` are its source, the mark and its other ones. Only root can do so, if it sees the engine's processes.
    """
    of_container = re.compile(rf"[/-]{re.escape(container)}(\.scope)?(/|$)", re.M)
    with contextlib.suppress(OSError, subprocess.SubprocessError), contextlib.ExitStack() as stack:
        process = os.open(PROC / str(pid), FOLDER)  # still this process if its pid is used again
        stack.callback(os.close, process)
        with open(os.open("cgroup", os.O_RDONLY | os.O_CLOEXEC, dir_fd=process)) as file:
            if not of_container.search(file.read()):  # another process: that number is of the engine's machine
                return False
        namespace = os.open("ns/net", os.O_RDONLY | os.O_CLOEXEC, dir_fd=process)
        stack.callback(os.close, namespace)
        if os.path.samestat(os.fstat(namespace), os.stat(PROC / "self" / "ns" / "net")):
            return False
        command = [sys.executable, "-I", "-S", "-c", ENTER, str(namespace), *arguments]
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=HELPER_TIMEOUT,
            pass_fds=[namespace],
            start_new_session=True,  # Ctrl-C must not reach it
        )
        if done.returncode:
            log.info("a packet filter could not be set up from here: %s", done.stderr.decode(errors="replace")[-300:])
        return not done.returncode and marked(pid, int(arguments[1]))
    return False


def _servers(inspected: dict[str, Any]) -> str:
    """Return the content of a node's resolv.conf, as an argument; raises OSError."""
    with regular(str(inspected.get("ResolvConfPath", ""))) as file:
        return "dns:" + file.read(MAX_NAMES).decode(errors="replace").replace("\0", "")


def wanted(spec: JobSpec) -> bool:
    """Whether a job uses the filter."""
    return not spec.host_access and spec.network != "host"


def blocked(info: dict[str, Any], node: Container) -> list[Pattern]:
    """Return the addresses to block for a node; `info` describes the engine."""
    found = [_pattern(network) for network in (*METADATA, *NEIGHBOURS)]
    for pool in info.get("DefaultAddressPools") or POOLS:
        found += _gateways(pool["Base"], pool["Size"])
    for one in map(_pattern, (*addresses(PROC / "net"), *map(str, _neighbours(node)))):
        if not any(_is_within(one, other) for other in found):
            found.append(one)
    return sorted(found, key=str)


def _is_within(one: Pattern, other: Pattern) -> bool:
    """Whether all addresses of a pattern are those of another."""
    (address, fixed), (value, mask) = one, other
    same = address.version == value.version and int(address) & int(mask) == int(value)
    return same and int(fixed) & int(mask) == int(mask)


def addresses(net: Path) -> list[str]:
    """Return this machine's addresses, networks and broadcast addresses from `/proc/net`; empty if it does not exist.

    A whole network is the machine's if `ip route add local` says so.
    """
    found: list[str] = []
    with contextlib.suppress(OSError):
        text = (net / "fib_trie").read_text().partition("\nId ")[0]  # without tables that rules select
        for address, routes in re.findall(r"\|-- (\S+)\n((?: +/.*\n?)+)", text):
            found += [address + length for length in re.findall(r"(/\d+) (?:host LOCAL|link BROADCAST)", routes)]
    with contextlib.suppress(OSError):
        lines = (net / "if_inet6").read_text().splitlines()
        found += [str(IPv6Address(bytes.fromhex(line.split()[0]))) for line in lines]
    return [one for one in found if not ip_network(one).is_loopback]


def marked(pid: int, mark: int) -> bool:
    """Whether a helper has marked the network namespace of a process."""
    try:
        return program.marked((PROC / str(pid) / "net" / "route").read_text(), mark)
    except OSError:
        return False


def _gateways(base: str, size: int) -> list[Pattern]:
    """Return the possible gateway and broadcast addresses in the networks of an address pool."""
    pool = ip_network(base, strict=False)
    hosts = (1 << (pool.max_prefixlen - size)) - 1
    mask = ip_address(int(pool.netmask) | hosts)
    return [(pool[number], mask) for number in ((1, hosts) if pool.version == 4 else (1,))]


def _neighbours(node: Container) -> list[Address]:
    """Return the gateways and broadcast addresses of a node's networks."""
    found = []
    for network in node.attrs["NetworkSettings"]["Networks"].values():
        found += [ip_address(network[key]) for key in ("Gateway", "IPv6Gateway") if network.get(key)]
        if network.get("IPAddress"):
            found.append(ip_interface(f"{network['IPAddress']}/{network['IPPrefixLen']}").network.broadcast_address)
    return found


def networks(node: Container) -> list[Pattern]:
    """Return the networks of a node."""
    found = []
    for network in node.attrs["NetworkSettings"]["Networks"].values():
        for address, length in (("IPAddress", "IPPrefixLen"), ("GlobalIPv6Address", "GlobalIPv6PrefixLen")):
            if network.get(address):
                found.append(_pattern(str(ip_interface(f"{network[address]}/{network[length]}").network)))
    return sorted(found, key=str)


def _pattern(network: str) -> Pattern:
    """Return a pattern for a network or a single address."""
    found = ip_network(network)
    return found.network_address, found.netmask


def _endpoint(node: Container) -> str:
    """Return an id that changes whenever a container starts."""
    networks = node.attrs["NetworkSettings"]["Networks"].values()
    return " ".join([str(node.id), *(network.get("EndpointID", "") for network in networks)])
