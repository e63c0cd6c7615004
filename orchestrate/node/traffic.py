"""How many bytes workers exchange with each other, and whether they use a GPU: what the kernel knows of their files.

The kernel counts the bytes of each TCP connection (tcp(7), `tcp_info`) and reports them over sock_diag(7), to every
user and in every container. A connection belongs to the worker whose process has its socket open.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, Protocol

from orchestrate.node.command import launcher
from orchestrate.node.warm import processes

# Numbers of linux/netlink.h, linux/sock_diag.h, linux/inet_diag.h and linux/tcp.h.
NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY = 4, 20
NLM_F_REQUEST_DUMP, NLMSG_ERROR, NLMSG_DONE = 0x301, 2, 3
INET_DIAG_INFO, ESTABLISHED = 2, 1
BYTES_ACKED, INODE, ATTRIBUTES = 120, 68, 72  # offsets in tcp_info and in inet_diag_msg

# Seconds between two samples: a fiftieth of the time since the start, within these bounds. A sample of four workers
# takes 0.3 ms of CPU time; on a machine with many connections, samples take at most a twentieth of a core.
MIN_INTERVAL, MAX_INTERVAL, MAX_LOAD = 0.05, 0.25, 0.05
SCAN_INTERVALS = 0.5, 5.0  # seconds between two scans of all processes, at first and at most
MAX_FAILURES = 20  # failed samples, before any has succeeded, after which there are no more
MAX_FILES = 16_384  # open files that are read for one sample
MAX_LINE = 4096  # bytes of a command line that are read
MAX_MAPS = 4 << 20  # bytes of a process's memory map that are searched
TORCH = b"/torch/lib/libtorch_cpu."  # in a memory map, after the folder of packages
METADATA = re.compile(r"torch-([\w.+]{1,40})\.dist-info", re.ASCII)  # in that folder; its name has the version
MAX_PACKAGES = 10_000  # entries of that folder that are read
GPU_FILES = ("/dev/nvidia", "/dev/dxg")  # how the paths of GPU devices begin; the latter on WSL

MAPPED = bytes(10) + b"\xff\xff"  # how an IPv4 address begins that a socket for both versions shows as an IPv6 one

End = tuple[bytes, int]  # address and port


class Connection(NamedTuple):
    """An established TCP connection of this network namespace."""

    inode: int  # of its socket
    local: End
    remote: End
    bytes: int  # sent and received


class Use(NamedTuple):
    """What a worker has used so far."""

    exchanged: int  # bytes sent to and received from other workers
    connected: float  # seconds for which it was connected to another worker
    sampled: float  # seconds for which it was sampled
    gpu: bool  # whether a GPU device was open
    torch: bool  # whether torch's library was loaded
    version: str  # of torch; empty if unknown
    launcher: str  # what starts workers of its own in it, if that was seen


class _Worker:
    """What is known of one worker."""

    def __init__(self, now: float) -> None:
        self.first = self.last = now  # times of samples
        self.connected = 0.0
        self.pids: list[int] = []  # its processes, as of the last scan
        self.bytes: dict[int, int] = {}  # by inode, of connections that exist
        self.closed = 0  # bytes of connections that have ended
        self.gpu = self.torch = False
        self.version = self.launcher = ""


class Timers(Protocol):
    """What is used of the node's loop."""

    def time(self) -> float:
        """Seconds of a clock that never goes back."""

    def after(self, seconds: float, callback: Callable[[], None]) -> None:
        """Call `callback` once, `seconds` from now."""


class Traffic:
    """Samples the connections of a node's workers: a short job is connected for a moment only."""

    def __init__(self, loop: Timers, pids: Callable[[], dict[int, int]]) -> None:
        """Sample by timers of `loop` as long as there are workers; `pids()` are their process IDs by rank."""
        self.loop, self.pids = loop, pids
        self.workers: dict[int, _Worker] = {}  # by rank
        self.sockets: dict[int, int] = {}  # rank by inode; -1 for a socket of another process
        self.started = self.next_scan = 0.0
        self.scan_interval = SCAN_INTERVALS[0]
        self.files = 0  # open files that this sample may still read
        self.took = 0.0  # CPU seconds of the last sample
        self.failures = 0
        self.waiting = False

    def start(self) -> None:
        """Sample from now on; called whenever a worker starts."""
        self.started = self.loop.time()
        self.next_scan, self.scan_interval = 0.0, SCAN_INTERVALS[0]
        if not self.waiting:
            self._wait()

    def forget(self) -> None:
        """Forget all workers: those of another generation, or job, follow."""
        self.workers, self.sockets = {}, {}

    def use(self, rank: int) -> Use | None:
        """What a worker has used so far; None if it was not sampled, or the kernel does not report connections."""
        worker = self.workers.get(rank)
        if worker is None:
            return None
        exchanged, sampled = worker.closed + sum(worker.bytes.values()), worker.last - worker.first
        times = round(worker.connected, 3), round(sampled, 3)
        return Use(exchanged, *times, worker.gpu, worker.torch, worker.version, worker.launcher)

    def sample(self) -> None:
        """Look at all workers now; raises OSError or ValueError if the kernel does not report connections."""
        running = {rank: pid for rank, pid in self.pids().items() if pid}
        found, now = [one for one in connections() if _near(one)], self.loop.time()
        for rank in running.keys() - self.workers:
            self.workers[rank] = _Worker(now)
            self.next_scan, self.scan_interval = 0.0, SCAN_INTERVALS[0]  # it may start long after `start`
        self.files = MAX_FILES
        if now > self.next_scan:
            self._scan(running, now)
        elif self._unknown(found):
            for rank in running:
                self._look(rank, libraries=False)
            if self._unknown(found):  # of a process that is new, or not ours
                self._scan(running, now)
        for one in found:
            self.sockets.setdefault(one.inode, -1)
        peers = _between_workers(found, self.sockets, in_container=os.getpid() == 1)
        inodes = {one.inode for one in found}
        for rank in running:
            self._note(self.workers[rank], peers.get(rank, {}), inodes, now)

    def _note(self, worker: _Worker, current: dict[int, int], inodes: set[int], now: float) -> None:
        """Note a worker's connections: bytes by inode. `inodes` are those of all connections."""
        worker.connected += (now - worker.last) * bool(current)
        worker.last = now
        for inode in worker.bytes.keys() - inodes:
            worker.closed += worker.bytes.pop(inode)
        for inode, number in current.items():
            worker.bytes[inode] = max(number, worker.bytes.get(inode, 0))

    def _wait(self) -> None:
        self.waiting = True
        interval = min(max((self.loop.time() - self.started) / 50, MIN_INTERVAL), MAX_INTERVAL)
        self.loop.after(max(interval, self.took / MAX_LOAD), self._due)

    def _due(self) -> None:
        self.waiting = False
        if not self.pids():
            return
        began = time.process_time()
        try:
            self.sample()
        except Exception:  # what this finds in other processes must not end the node
            self.failures += 1
            if not self.workers and self.failures >= MAX_FAILURES:  # this system does not report connections
                return
        self.took = time.process_time() - began
        self._wait()

    def _unknown(self, found: Iterable[Connection]) -> bool:
        return any(one.inode not in self.sockets for one in found)

    def _scan(self, running: dict[int, int], now: float) -> None:
        """Find all processes of the workers, and look at them."""
        self.next_scan = now + self.scan_interval
        self.scan_interval = min(2 * self.scan_interval, SCAN_INTERVALS[1])
        self.sockets = {}
        for rank, pids in families(running).items():
            self.workers[rank].pids = pids
            self._look(rank, libraries=True)

    def _look(self, rank: int, libraries: bool) -> None:
        """Note the sockets of a worker's processes, whether it has a GPU open and, if asked, its libraries."""
        worker = self.workers[rank]
        for pid in worker.pids:
            with contextlib.suppress(OSError):  # it has ended, or has made itself unreadable
                names = os.listdir(f"/proc/{pid}/fd")[: self.files]
                self.files -= len(names)
                for name in names:
                    with contextlib.suppress(OSError, ValueError):
                        path = os.readlink(f"/proc/{pid}/fd/{name}")
                        if path.startswith("socket:["):
                            self.sockets[int(path[8:-1])] = rank
                        elif path.startswith(GPU_FILES):
                            worker.gpu = True
                if libraries and not worker.launcher:
                    with open(f"/proc/{pid}/cmdline", "rb") as file:
                        worker.launcher = launcher(file.read(MAX_LINE).decode(errors="replace").split("\0"))
                if libraries and not worker.torch:
                    with open(f"/proc/{pid}/maps", "rb") as file:
                        found = file.read(MAX_MAPS)
                    worker.torch, worker.version = b"/libtorch_cpu." in found, _version(found)


def _version(maps: bytes) -> str:
    """The version of torch in a process's memory map; empty if it has none, or was not installed as a package."""
    end = maps.find(TORCH)
    start = maps.find(b"/", maps.rfind(b"\n", 0, end) + 1, end)
    if end < 0 or start < 0:
        return ""
    folder = os.fsdecode(maps[start:end])
    if not folder.endswith(("/site-packages", "/dist-packages")):
        return ""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        names = map(METADATA.fullmatch, (entry.name for entry in itertools.islice(entries, MAX_PACKAGES)))
        found = {name[1] for name in names if name}
        return found.pop() if len(found) == 1 else ""
    return ""


def families(workers: dict[int, int]) -> dict[int, list[int]]:
    """The processes of each worker, by rank: those of the session that it leads, and its descendants.

    A launcher such as torchrun starts its workers in sessions of their own.
    """
    ranks = {pid: rank for rank, pid in workers.items()}
    parents = {pid: (int(facts[1]), int(facts[3])) for pid, facts in processes() if len(facts) > 3}
    found: dict[int, list[int]] = {rank: [] for rank in workers}
    for pid, (_, session) in parents.items():
        ancestor, steps = pid, 0
        while ancestor not in ranks and ancestor in parents and steps < len(parents):
            ancestor, steps = parents[ancestor][0], steps + 1
        rank = ranks.get(ancestor, ranks.get(session, -1))
        if rank >= 0:
            found[rank].append(pid)
    return found


def _between_workers(
    found: Iterable[Connection], sockets: dict[int, int], in_container: bool
) -> dict[int, dict[int, int]]:
    """The bytes of each worker's connections to other workers, by rank and inode.

    Both ends of a local connection in a container are here, and so the other one must be another worker's.
    """
    ours = [one for one in found if sockets.get(one.inode, -1) >= 0]
    ends = {(one.local, one.remote): sockets[one.inode] for one in ours}
    between: dict[int, dict[int, int]] = {}
    for one in ours:
        rank, other = sockets[one.inode], ends.get((one.remote, one.local))
        local = in_container and one.local[0] == one.remote[0]
        if other != rank and not (local and other is None):
            between.setdefault(rank, {})[one.inode] = one.bytes
    return between


def _near(connection: Connection) -> bool:
    """Whether both ends may be on one network, as those of workers are: nodes of a job share a /16 or a /64."""
    local, remote = connection.local[0], connection.remote[0]
    size = 2 if len(local) == 4 else 8
    return len(local) == len(remote) and local[:size] == remote[:size]


def connections() -> Iterator[Connection]:
    """All established TCP connections; raises OSError if this system does not report them."""
    if not hasattr(socket, "AF_NETLINK"):
        raise OSError("this is not Linux")
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_SOCK_DIAG) as kernel:
        kernel.settimeout(1.0)
        for family in (socket.AF_INET, socket.AF_INET6):
            request = struct.pack("=BBBxI48x", family, socket.IPPROTO_TCP, 1 << (INET_DIAG_INFO - 1), 1 << ESTABLISHED)
            head = struct.pack("=IHHII", 16 + len(request), SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST_DUMP, 0, 0)
            kernel.send(head + request)
            done = False
            while not done:
                data = kernel.recv(1 << 17)
                while data and not done:
                    length, kind = struct.unpack_from("=IH", data)
                    done = kind in (NLMSG_DONE, NLMSG_ERROR)
                    if kind == NLMSG_ERROR or length < 16:
                        raise OSError("the kernel does not report TCP connections")
                    if not done:
                        yield _connection(data[16:length])
                    data = data[(length + 3) & ~3 :]


def _connection(message: bytes) -> Connection:
    size = 4 if message[0] == socket.AF_INET else 16
    ports = struct.unpack_from(">HH", message, 4)
    local, remote = (message[start : start + size].removeprefix(MAPPED) for start in (8, 24))
    (inode,) = struct.unpack_from("=I", message, INODE)
    rest, total = message[ATTRIBUTES:], 0
    while len(rest) >= 4:
        length, kind = struct.unpack_from("=HH", rest)
        if kind == INET_DIAG_INFO and length >= 4 + BYTES_ACKED + 16:
            total = sum(struct.unpack_from("=QQ", rest, 4 + BYTES_ACKED))
        rest = rest[max(4, (length + 3) & ~3) :]
    return Connection(inode, (local, ports[0]), (remote, ports[1]), total)
