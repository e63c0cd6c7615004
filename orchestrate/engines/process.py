"""Nodes as local processes: the same plan, logs and files without Docker."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from orchestrate.console import during
from orchestrate.engines import looked, sockets
from orchestrate.engines.base import SWARMS, JobState, Observed, Stop, ignoring, never
from orchestrate.engines.clients import NodeClients, key_of
from orchestrate.engines.connection import NodeConnection
from orchestrate.errors import EngineError, ResourceError
from orchestrate.files import private
from orchestrate.files.paths import NODE, PROJECT, code_folder
from orchestrate.job.container import UNBUFFERED
from orchestrate.job.cores import cores
from orchestrate.job.gpus import Offer, fields, look, offer, why_none
from orchestrate.job.outcomes import LOST, Doing, Reason, WorkerExit
from orchestrate.job.plan import Inventory, Placement, Plan, WorkerPlan
from orchestrate.job.preload import may_use_torch, preload
from orchestrate.job.spec import JobSpec, unencodable
from orchestrate.node import protocol
from orchestrate.node.warm import POSSIBLE

LIMITS = ("image", "user", "memory", "cpus", "shm_size", *SWARMS)  # keys of a job file that only containers support
LISTEN_TIMEOUT = 10.0  # seconds within which a node of another orchestrator listens


@dataclass
class _Node:
    """A process that waits on a Unix socket; `child` if we have started it ourselves."""

    path: Path
    pid: int
    child: subprocess.Popen[bytes] | None = None

    def alive(self) -> bool:
        """Whether it runs."""
        if self.child is not None:
            return self.child.poll() is None
        return _listener(self.path) == self.pid

    def signal(self, number: int) -> None:
        """Send it a signal, unless it has gone."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)


class ProcessEngine:
    """A node is a process group that waits on a Unix socket; jobs are found by the folders of their sockets."""

    name = "process"

    def __init__(self) -> None:
        self.state = private.temporary()

    def prepare(self, spec: JobSpec) -> None:
        """Do nothing: local processes need no image."""

    def inventory(self, spec: JobSpec, run: Path, look_inside: bool) -> tuple[Inventory, Placement]:
        """Return what this machine has; raises ResourceError if torch is missing and the app needs it."""
        code = code_folder(spec.command)
        if code == PROJECT and importlib.util.find_spec("torch") is None:
            raise ResourceError(f"no torch in {sys.executable}", "pip install torch torchvision, or start Docker")
        modules = preload(spec, code)
        offered = _offer(spec)
        if offered.gpus and may_use_torch(spec, modules) and (why := looked.useless(offered.gpus)):
            offered = Offer(why=f"{sys.executable} cannot use the GPUs: {why}")
        inventory = Inventory(
            engine="process",
            about=f"local processes without isolation{ignoring(spec, LIMITS, 'the process engine')}",
            cores=cores(),
            **fields(offered, spec.pin),
        )
        placement = Placement(
            network="",
            master_addr="127.0.0.1",
            interface="lo" if sys.platform == "linux" else "lo0",
            job_dir=str(run),
            code=str(code),
            preload=modules if POSSIBLE else (),
        )
        return inventory, placement

    def open(self, spec: JobSpec, plan: Plan, run: Path, warn: Callable[[str], None]) -> ProcessSession:
        """The processes of a job; raises EngineError if there is no key to talk to them."""
        return ProcessSession(self.state / plan.project, spec, plan, run, warn)

    def jobs(self) -> list[JobState]:
        """The jobs whose nodes listen."""
        found = []
        for folder in sorted(self.state.glob("*")):
            nodes = [pid for path in folder.glob("*.sock") if (pid := _listener(path))]
            if nodes:
                run = (folder / "run").resolve()
                found.append(JobState(folder.name, "process", len(nodes), run, os.getuid()))
        return found

    def holds(self, job_id: str) -> list[str]:
        """The nodes that listen, and the folder of their sockets."""
        folder = self.state / job_id
        nodes = [f"process {pid} ({path.stem})" for path, pid in _waiting(folder)]
        return [*nodes, *([f"folder {folder}"] if folder.exists() else [])]

    def remove(self, job_id: str, grace: float) -> None:
        """End the nodes that listen for a job."""
        _end([_Node(path, pid) for path, pid in _waiting(self.state / job_id)], grace)
        shutil.rmtree(self.state / job_id, ignore_errors=True)


class ProcessSession:
    """The local processes that are the nodes of one job."""

    def __init__(self, folder: Path, spec: JobSpec, plan: Plan, run: Path, warn: Callable[[str], None]) -> None:
        """`folder` is where nodes listen, and `run` what they would mount; raises EngineError if it has no key."""
        self.folder, self.spec, self.run, self.key = folder, spec, run, key_of(run)
        self.cwd, self.stays = plan.placement.code, bool(plan.placement.cluster)  # whether nodes outlive the job
        self.nodes: dict[str, _Node] = {}
        self.clients = NodeClients(self, warn)

    def up(self, plan: Plan, stopped: Callable[[], bool] = never) -> None:
        """Start a waiting process for each node that has none."""
        if why := unencodable(self.spec):  # nodes have our locale, and reject such text
            raise EngineError(why, "export LC_ALL=C.UTF-8")
        self._find()
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                (self.folder / "run").symlink_to(self.run)
            lacking = [name for name in plan.nodes if name not in self.nodes or not self.nodes[name].alive()]
            fresh = [self._spawn(name, plan) for name in lacking]
        except OSError as error:
            raise EngineError(f"cannot start a node: {error}") from None
        deadline = time.monotonic() + 60
        while not all(_listener(node.path) for node in fresh):
            if time.monotonic() > deadline or stopped() or not all(node.alive() for node in fresh):
                raise EngineError("a node did not start", f"to see why: RANK=0 {sys.executable} {NODE} -c pass")
            time.sleep(0.01)

    def _spawn(self, name: str, plan: Plan) -> _Node:
        path = self.folder / f"{name}.sock"
        path.unlink(missing_ok=True)
        env = os.environ | {"NODE_MODE": "agent", "NODE_SOCKET": str(path), "NODE_GRACE": str(self.spec.grace)}
        visible = ",".join(plan.gpus)  # so that modules find the GPUs of the job when they are imported
        env |= {"NODE_PRELOAD": " ".join(plan.placement.preload), "NODE_KEY": self.key.hex()}
        env["CUDA_VISIBLE_DEVICES"] = visible
        lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the node holds it as long as it lives
        child = subprocess.Popen(
            [sys.executable, "-I", f"-Xutf8={sys.flags.utf8_mode}", str(NODE)],  # it imports nothing of the job's
            env=env,
            cwd=self.cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=[lock],
        )
        os.close(lock)
        self.nodes[name] = _Node(path, child.pid, child)
        return self.nodes[name]

    def alive(self) -> dict[str, str]:
        """The nodes that run, all on this machine."""
        return {name: "" for name, node in list(self.nodes.items()) if node.alive()}

    def warmed(self, nodes: Iterable[str], patience: float) -> bool:
        """Wait until nodes have imported what workers will need."""
        return self.clients.warmed(nodes, patience)

    def adopt(self, plan: Plan) -> set[int]:
        """Find the nodes by their sockets, and ask them for their workers."""
        self._find()
        return self.clients.adopt(plan)

    def gather(self, stopped: Callable[[], bool]) -> None:
        """Do nothing: nodes write to the job's folder itself."""

    def start(self, plan: Plan) -> None:
        """Start the workers of a plan."""
        self.clients.start(plan)

    def wait(self, timeout: float) -> Observed:
        """What has happened to the workers; local processes are neither paused nor cut off from the network."""
        return Observed(self.clients.wait(timeout), self.clients.starting())

    def doing(self) -> dict[int, Doing]:
        """What the running workers are doing."""
        return self.clients.doing()

    def explain(self, end: WorkerExit, node: str) -> Reason | None:
        """The cause: its node has ended, or the kernel has killed a process for lack of memory."""
        if node not in self.clients.connections or node not in self.alive():  # connections close before it has ended
            return Reason.NODE_LOST
        return Reason.OUT_OF_MEMORY if end.code == LOST and self.clients.exit_hints.get(end.rank) == "oom" else None

    def stop(self, how: Stop) -> None:
        """Ask all workers to end."""
        self.clients.stop(how)

    def discard(self, nodes: Iterable[str]) -> None:
        """Kill nodes, with their workers."""
        _end([self.nodes[name] for name in nodes], 0, (signal.SIGKILL,))

    def down(self, grace: float, stopped: Callable[[], bool] = never) -> None:
        """End the nodes and all that runs in them; clean up those of a cluster."""
        if self.stays:
            return self.discard(self.clients.clean(self.nodes))
        _end(list(self.nodes.values()), grace)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _find(self) -> None:
        """Find those of the job's nodes that listen."""
        for path, pid in _waiting(self.folder):
            if path.stem not in self.nodes or not self.nodes[path.stem].alive():
                self.nodes[path.stem] = _Node(path, pid)

    # --- what connections to nodes ask for

    def connect(self, node: str) -> NodeConnection | None:
        """Connect to the socket of a node; None if nothing listens there."""
        try:
            return sockets.connect(self.nodes[node].path, self.key)
        except (OSError, KeyError):
            return None

    def runs(self, node: str) -> bool:
        """No: the node has died. Kills the process groups of its workers."""
        for pid in [self.clients.pids[rank] for rank in self.clients.on(node) if rank in self.clients.pids]:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if pid > 1:  # the node reports it, so it is untrusted
                    os.killpg(pid, signal.SIGKILL)
        return False

    def may_recover(self, node: str) -> bool:
        """Whether it is alive, though it does not answer."""
        return node in self.alive()

    def request(self, worker: WorkerPlan, command: tuple[str, ...]) -> protocol.Start:
        """The environment of this process and the worker's own."""
        env = os.environ | UNBUFFERED | worker.env
        return protocol.Start([*command], env, inherit=False, cwd=self.cwd)


def _waiting(folder: Path) -> Iterator[tuple[Path, int]]:
    """The sockets and process ids of a job's nodes; waits for those that do not listen yet."""
    for lock in sorted(folder.glob("*.lock")):
        path, deadline = lock.with_suffix(".sock"), time.monotonic() + LISTEN_TIMEOUT
        while not (pid := _listener(path)) and _held(lock) and time.monotonic() < deadline:
            time.sleep(0.01)
        if pid:
            yield path, pid


def _held(lock: Path) -> bool:
    """Whether a node holds this lock."""
    try:
        with lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


@during("looking for GPUs")
def _offer(spec: JobSpec) -> Offer:
    """The GPUs of this machine that a job can have."""
    if spec.gpus == "none":
        return Offer()
    found = look()
    return offer(found, spec.gpus) if found else Offer(why=why_none())


def _listener(path: Path) -> int:
    """The process that listens on a Unix socket, or 0."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return 0
        if sys.platform == "linux":
            return int(struct.unpack("3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0])
        return int(struct.unpack("i", probe.getsockopt(0, 2, 4))[0])  # SOL_LOCAL, LOCAL_PEERPID of macOS


def _end(nodes: list[_Node], grace: float, by: Iterable[int] = (signal.SIGTERM, signal.SIGKILL)) -> None:
    """End nodes, gently for `grace` seconds and then by force."""
    deadline = time.monotonic() + grace + 1
    for number in by:
        for node in filter(_Node.alive, nodes):
            node.signal(number)
        while any(node.alive() for node in nodes) and time.monotonic() < deadline:
            time.sleep(0.02)
        deadline += 1
