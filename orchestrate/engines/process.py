"""Local processes as nodes: the same plan, logs and files without Docker."""

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
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from orchestrate.clock import SYSTEM, Clock, wait_until
from orchestrate.console import during, print_message
from orchestrate.engines import check_cache, sockets, venv
from orchestrate.engines.base import SWARMS, JobState, Local, Observed, ignoring, never
from orchestrate.engines.client_session import ClientSession, key_of
from orchestrate.engines.connection import NodeConnection
from orchestrate.engines.node_clients import NodeClients
from orchestrate.errors import EngineError, ResourceError
from orchestrate.files.paths import NODE, NODES, PROJECT, code_folder
from orchestrate.host import private
from orchestrate.host.cores import cores
from orchestrate.host.gpus import Offer, claimed, fields, look, offer, why_none
from orchestrate.node import warm
from orchestrate.node.messages import protocol
from orchestrate.node.warm import SUPPORTED, processes
from orchestrate.plan.container import UNBUFFERED
from orchestrate.plan.plan import Inventory, Placement, Plan, WorkerPlan, may_use_torch
from orchestrate.plan.preload import preload
from orchestrate.record.outcomes import LOST_EXIT_CODE, WorkerExit
from orchestrate.spec import secret_files
from orchestrate.spec.causes import Reason
from orchestrate.spec.folders import data_folders
from orchestrate.spec.source import GIT
from orchestrate.spec.spec import JobSpec, unencodable

# Keys of a job file that only containers support.
UNSUPPORTED = (
    *("image", "dockerfile", "mounts", "user", "memory", "cpus", "shm_size"),
    *("isolated", "labels", "ports", "services", *SWARMS),
)
LISTEN_TIMEOUT = 10.0  # seconds until a node that another orchestrator started must listen


@dataclass
class _Node:
    """A node process that listens on a Unix socket; `child` is set if this process started it."""

    path: Path
    pid: int
    child: subprocess.Popen[bytes] | None = None

    def alive(self) -> bool:
        """Whether the process is running."""
        if self.child is not None:
            return self.child.poll() is None
        return _listener_pid(self.path) == self.pid

    def signal(self, number: int) -> None:
        """Send a signal, unless the process is gone."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)


class ProcessEngine:
    """Local processes: each node is a process group, and jobs are found by the folders of their sockets."""

    name = "process"

    def __init__(self, clock: Clock = SYSTEM) -> None:
        self.state, self.clock = private.temporary(), clock

    def prepare(self, spec: JobSpec, run: Path) -> None:
        """Install the job's packages in a virtual environment; raises ResourceError if that fails."""
        if spec.pip:
            venv.create(spec.pip)

    def inventory(self, spec: JobSpec, run: Path, run_image: bool) -> tuple[Inventory, Placement]:
        """Return the resources of this machine; raises ResourceError if a package that the app needs is missing."""
        code = code_folder(spec.command)
        app = code == PROJECT and run.name != NODES  # a cluster may run other jobs
        missing = [name for name in ("torch", "safetensors") if app and not importlib.util.find_spec(name)]
        if missing:
            hint = "pip install torch torchvision safetensors, or start Docker"
            raise ResourceError(f"{missing[0]} is not installed in {sys.executable}", hint)
        modules = preload(spec, code, copied=spec.source.startswith(GIT))
        offered = _offer(spec, run.parent.name)
        if offered.gpus and may_use_torch(spec, modules) and (why := check_cache.gpu_problem(offered.gpus)):
            offered = Offer(why=f"{sys.executable} cannot use the GPUs: {why}")
        inventory = Inventory(
            engine="process",
            about=f"local processes without isolation{ignoring(spec, UNSUPPORTED, 'the process engine')}",
            cores=cores(),
            **fields(offered, spec.pin),
        )
        placement = Placement(
            network="",
            master_addr="127.0.0.1",
            interface="lo" if sys.platform == "linux" else "lo0",
            job_dir=str(run),
            code=str(code),
            original=str(code) if spec.source.startswith(GIT) else "",  # later runs use the checkout, too
            data=data_folders(spec),
            python=str(venv.python(spec.pip)) if spec.pip else sys.executable,
            preload=modules if SUPPORTED else (),
        )
        return inventory, placement

    def hidden(self, plan: Plan, run: Path) -> Collection[str]:
        """Return no paths: workers do not run in a copy of the code folder."""
        return ()

    def open(self, spec: JobSpec, plan: Plan, run: Path, warn: Callable[[str], None]) -> ProcessSession:
        """Open the session of a job; raises EngineError if it has no key."""
        return ProcessSession(self.state / plan.project, spec, plan, run, warn, self.clock)

    def inside(self, spec: JobSpec, plan: Plan, run: Path, worker: WorkerPlan, terminal: bool) -> Local:
        """Return the environment and the working directory of a worker."""
        session = self.open(spec, plan, run, print_message)
        request = session.request(worker, ())
        return Local([], secret_files.variables(spec, session.secrets) | request.env, request.cwd)

    def jobs(self) -> list[JobState]:
        """List the jobs whose nodes listen."""
        found = []
        for folder in sorted(self.state.glob("*")):
            nodes: list[int] = []
            with contextlib.suppress(FileNotFoundError):  # the job has just ended
                nodes = [pid for path in folder.glob("*.sock") if (pid := _listener_pid(path))]
            if nodes:
                run = (folder / "run").resolve()
                found.append(JobState(folder.name, "process", len(nodes), run, os.getuid()))
        return found

    def resources(self, job_id: str) -> list[str]:
        """Describe the listening nodes and the folder of their sockets."""
        folder = self.state / job_id
        nodes = [f"process {pid} ({path.stem})" for path, pid in _listening_nodes(folder, self.clock)]
        return [*nodes, *([f"folder {folder}"] if folder.exists() else [])]

    def memory(self, job_id: str) -> int:
        """Return the memory of the nodes and their processes; memory that they share counts once."""
        return sum(map(_memory, _family({pid for _, pid in _listening_nodes(self.state / job_id, self.clock)})))

    def remove(self, job_id: str, grace: float) -> None:
        """Stop the listening nodes of a job."""
        nodes = [_Node(path, pid) for path, pid in _listening_nodes(self.state / job_id, self.clock)]
        _stop_nodes(nodes, grace, self.clock)
        shutil.rmtree(self.state / job_id, ignore_errors=True)


class ProcessSession(ClientSession):
    """The node processes of one job."""

    def __init__(
        self, folder: Path, spec: JobSpec, plan: Plan, run: Path, warn: Callable[[str], None], clock: Clock
    ) -> None:
        """`folder` contains the sockets, and `run` the job's files; raises EngineError if the job has no key."""
        self.folder, self.spec, self.run, self.key, self.clock = folder, spec, run, key_of(run), clock
        self.secrets, self.cwd = str(folder / "secrets"), plan.placement.code
        self.workdir = plan.placement.cwd(self.cwd)
        self.persistent = bool(plan.placement.cluster)  # whether the nodes outlive the job
        self.python = plan.placement.python
        self.nodes: dict[str, _Node] = {}
        self.clients = NodeClients(self, warn)

    def up(self, plan: Plan, stopped: Callable[[], bool] = never) -> None:
        """Start a process for each missing node."""
        if why := unencodable(self.spec):  # nodes inherit our locale, which cannot encode it
            raise EngineError(why, "export LC_ALL=C.UTF-8")
        self._find_nodes()
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                (self.folder / "run").symlink_to(self.run)
            missing = [name for name in plan.nodes if name not in self.nodes or not self.nodes[name].alive()]
            started = [self._spawn(name, plan) for name in missing]
        except OSError as error:
            raise EngineError(f"cannot start a node: {error}") from None
        deadline = self.clock.monotonic() + 60
        while not all(_listener_pid(node.path) for node in started):
            if self.clock.monotonic() > deadline or stopped() or not all(node.alive() for node in started):
                raise EngineError("a node did not start", f"to see why, run: RANK=0 {self.python} {NODE} -c pass")
            self.clock.sleep(0.01)

    def _spawn(self, name: str, plan: Plan) -> _Node:
        path = self.folder / f"{name}.sock"
        path.unlink(missing_ok=True)
        env = os.environ | {"NODE_MODE": "agent", "NODE_SOCKET": str(path), "NODE_GRACE": str(self.spec.grace)}
        visible = ",".join(plan.gpus)  # modules may look for GPUs when they are imported
        env |= {"NODE_PRELOAD": " ".join(plan.placement.preload), "NODE_KEY": self.key.hex()}
        env |= {"CUDA_VISIBLE_DEVICES": visible, "NODE_KEEP": f"{plan.placement.keep or ''}"}
        lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # held until the node exits
        child = subprocess.Popen(
            [self.python, "-I", f"-Xutf8={sys.flags.utf8_mode}", str(NODE)],  # imports nothing from the job
            env=env,
            cwd=self.cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=[lock],
        )
        os.ftruncate(lock, 0)
        with contextlib.suppress(OSError):  # it has ended
            os.write(lock, _identity(child.pid))
        os.close(lock)
        threading.Thread(target=child.wait, daemon=True).start()  # it may outlive this session, of which `Popen` warns
        self.nodes[name] = _Node(path, child.pid, child)
        return self.nodes[name]

    def alive(self) -> dict[str, str]:
        """Return the running nodes, all on this machine."""
        return {name: "" for name, node in list(self.nodes.items()) if node.alive()}

    def adopt(self, plan: Plan) -> set[int]:
        """Find the nodes by their sockets, and take over their workers."""
        self._find_nodes()
        return self.clients.adopt(plan)

    def wait(self, timeout: float) -> Observed:
        """Wait for exits of workers; local processes are neither paused nor cut off from the network."""
        return Observed(self.clients.wait(timeout), self.clients.starting())

    def explain(self, end: WorkerExit, node: str) -> Reason | None:
        """Return the cause: the node has ended, or the kernel killed a process for lack of memory."""
        if node not in self.clients.connections or node not in self.alive():  # connections close before nodes exit
            return Reason.NODE_LOST
        return (
            Reason.OUT_OF_MEMORY
            if end.code == LOST_EXIT_CODE and self.clients.exit_hints.get(end.rank) == "oom"
            else None
        )

    def discard(self, nodes: Iterable[str]) -> None:
        """Kill nodes, with their workers."""
        _stop_nodes([self.nodes[name] for name in nodes], 0, self.clock, (signal.SIGKILL,))

    def down(self, grace: float, stopped: Callable[[], bool] = never) -> None:
        """Stop the nodes with all their processes; clean up the nodes of a cluster."""
        shutil.rmtree(self.secrets, ignore_errors=True)
        if self.persistent:
            return self.discard(self.clients.clean(self.nodes))
        _stop_nodes(list(self.nodes.values()), grace, self.clock)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _find_nodes(self) -> None:
        """Find the listening nodes of the job."""
        for path, pid in _listening_nodes(self.folder, self.clock):
            if path.stem not in self.nodes or not self.nodes[path.stem].alive():
                self.nodes[path.stem] = _Node(path, pid)

    # --- access to nodes, for their connections

    def connect(self, node: str) -> NodeConnection | None:
        """Connect to a node's socket; None if nothing listens there."""
        try:
            return sockets.connect(self.nodes[node].path, self.key)
        except (OSError, KeyError):
            return None

    def runs(self, node: str) -> bool:
        """Return False: a node without a connection has died. Kills the process groups of its workers."""
        for pid in [self.clients.pids[rank] for rank in self.clients.on(node) if rank in self.clients.pids]:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if pid > 1:  # reported by the node, so untrusted
                    os.killpg(pid, signal.SIGKILL)
        return False

    def may_recover(self, node: str) -> bool:
        """Whether the node is still running, although it does not respond."""
        return node in self.alive()

    def request(self, worker: WorkerPlan, command: tuple[str, ...]) -> protocol.Start:
        """Build a request with the environment of this process and the worker's own."""
        ours = {name: value for name, value in os.environ.items() if name not in self.spec.files}
        env = ours | {"PATH": self._search_path()} | UNBUFFERED | worker.env
        return protocol.Start([*command], env, inherit=False, cwd=self.workdir)

    def _search_path(self) -> str:
        """Return the PATH of workers, in which `python` is the one that runs scripts, if its folder has that name."""
        path, folder = os.environ.get("PATH", os.defpath), os.path.dirname(self.python)
        first = shutil.which("python", path=path)
        other = first is None or os.path.dirname(first) != folder
        return f"{folder}:{path}" if other and os.access(f"{folder}/python", os.X_OK) else path


def _listening_nodes(folder: Path, clock: Clock) -> Iterator[tuple[Path, int]]:
    """Yield sockets and process IDs of a job's nodes; waits for nodes that do not listen yet."""
    deadline = clock.monotonic() + LISTEN_TIMEOUT
    for lock in sorted(folder.glob("*.lock")):
        path = lock.with_suffix(".sock")
        while not (pid := _listener_pid(path)) and _is_locked(lock) and clock.monotonic() < deadline:
            clock.sleep(0.01)
        if pid:
            yield path, pid


def _family(pids: set[int]) -> set[int]:
    """Return processes and all their descendants."""
    parents = {pid: int(facts[1]) for pid, facts in processes() if facts} if sys.platform == "linux" else {}
    while more := {pid for pid, parent in parents.items() if parent in pids} - pids:
        pids |= more
    return pids


def _memory(pid: int) -> int:
    """Return the proportional set size of a process, in bytes; 0 if it has ended, or is not on Linux."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        return int(text.partition("\nPss:")[2].split()[0]) << 10
    return 0


def _is_locked(lock: Path) -> bool:
    """Whether a node holds a lock."""
    try:
        with lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


@during("looking for GPUs")
def _offer(spec: JobSpec, job: str) -> Offer:
    """Return the GPUs of this machine that are available to a job."""
    if spec.gpus == "none":
        return Offer()
    found = look()
    return offer(claimed(found, job), spec.gpus, queue=spec.queued_gpus) if found else Offer(why=why_none())


def _listener_pid(path: Path) -> int:
    """Return the ID of the process that listens on a Unix socket, or 0; does not wait for it to accept."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except BlockingIOError:  # its queue is full: it accepts nothing, for example because it is stopped
            lock = path.with_suffix(".lock")
            with contextlib.suppress(OSError, ValueError, IndexError):
                found = lock.read_bytes()[:100]
                pid = int(found.split()[0])
                return pid if _is_locked(lock) and found == _identity(pid) else 0
            return 0
        except OSError:
            return 0
        if sys.platform == "linux":
            return int(struct.unpack("3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0])
        return int(struct.unpack("i", probe.getsockopt(0, 2, 4))[0])  # SOL_LOCAL, LOCAL_PEERPID of macOS


def _identity(pid: int) -> bytes:
    """Return a process ID with the start time of the process, field 22 of proc(5); raises OSError if it has ended."""
    return b"%d %s" % (pid, warm.fields(pid)[19] if sys.platform == "linux" else b"")


def _stop_nodes(
    nodes: list[_Node], grace: float, clock: Clock, signals: Iterable[int] = (signal.SIGTERM, signal.SIGKILL)
) -> None:
    """Stop nodes: SIGTERM, then SIGKILL after `grace` seconds."""
    for number in signals:
        for node in filter(_Node.alive, nodes):
            node.signal(number)
        wait_until(lambda: not any(node.alive() for node in nodes), grace + 1, clock)
        grace = 0
