"""Nodes as local processes: the same job, plan, logs and files without Docker."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import queue
import random
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from orchestrate.engines import Exit, JobState
from orchestrate.errors import EngineError, ResourceError
from orchestrate.node.ranks import gpus
from orchestrate.paths import NODE, PROJECT, code_folder
from orchestrate.plan import Inventory, Plan, WorkerPlan
from orchestrate.spec import JobSpec

LIMITS = ("image", "memory", "cpus", "shm_size")  # what only containers have


class ProcessEngine:
    """A node is a process group that waits on a Unix socket; the folder of the sockets tells which jobs there are."""

    def __init__(self) -> None:
        self.state = Path(f"/tmp/orchestrate-{os.getuid()}")  # not $TMPDIR: a socket's path has 104 characters at most
        self.folder = Path()
        self.cwd = Path()
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}
        self.exits: queue.SimpleQueue[Exit] = queue.SimpleQueue()

    def inventory(self, spec: JobSpec, run: Path, prepare: bool) -> Inventory:
        """Say what this machine has; raises ResourceError where the app cannot run for lack of torch."""
        if code_folder(spec.command) == PROJECT and importlib.util.find_spec("torch") is None:
            raise ResourceError(f"no torch in {sys.executable}", "pip install torch torchvision, or start Docker")
        limits = [key for key in LIMITS if getattr(spec, key) != getattr(JobSpec(), key)]
        return Inventory(
            engine="process",
            about=f"local processes, ignoring {', '.join(limits)}" if limits else "local processes",
            cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
            gpus=tuple(gpus()) if spec.gpus != "none" else (),
            no_gpus="this machine has no NVIDIA GPU",
            master_addr="127.0.0.1",
            master_port=free_port(),
            interface="lo" if sys.platform == "linux" else "lo0",
            job_dir=str(run),
        )

    def up(self, spec: JobSpec, plan: Plan, run: Path) -> None:
        """Start a waiting process per node."""
        self.folder = self.state / plan.job_id
        self.cwd = code_folder(spec.command)
        self.state.mkdir(mode=0o700, exist_ok=True)
        self._check_owner()
        self.folder.mkdir(mode=0o700)
        (self.folder / "run").symlink_to(run)
        for name in plan.nodes:
            env = os.environ | {"NODE_MODE": "wait", "NODE_SOCKET": self._socket(name), "NODE_GRACE": str(spec.grace)}
            self.nodes[name] = subprocess.Popen(
                [sys.executable, str(NODE)],
                env=env,
                cwd=self.cwd,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        deadline = time.monotonic() + 60
        while not all(_listener(Path(self._socket(name))) for name in plan.nodes):
            if time.monotonic() > deadline or any(node.poll() is not None for node in self.nodes.values()):
                raise EngineError("a node did not start", f"try it by hand: NODE_MODE=wait {sys.executable} {NODE}")
            time.sleep(0.01)

    def start(self, workers: tuple[WorkerPlan, ...], command: tuple[str, ...]) -> None:
        """Start a stub per worker, which has the node start the worker and ends with its code."""
        for worker in workers:
            stub = subprocess.Popen(
                [sys.executable, str(NODE), "worker", *command],
                env=os.environ | {"PYTHONUNBUFFERED": "1", "NODE_SOCKET": self._socket(worker.node)} | worker.env,
                cwd=self.cwd,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            threading.Thread(target=self._follow, args=(worker.rank, stub), daemon=True).start()

    def wait(self, timeout: float) -> list[Exit]:
        """The workers that have ended since the last call."""
        exits: list[Exit] = []
        with contextlib.suppress(queue.Empty):
            exits.append(self.exits.get(timeout=timeout))
            while True:
                exits.append(self.exits.get_nowait())
        return exits

    def explain(self, end: Exit, node: str) -> str:
        """Tell whether the worker's node has died."""
        return "" if self._alive(self.nodes[node].pid) else "node lost"

    def stop(self, kill: bool) -> None:
        """Ask all workers to stop, or kill them."""
        for node in self.nodes.values():
            node.send_signal(signal.SIGUSR2 if kill else signal.SIGUSR1)

    def down(self, grace: float) -> None:
        """End the nodes, with what still runs in them."""
        _end([node.pid for node in self.nodes.values() if node.poll() is None], grace, self._alive)
        shutil.rmtree(self.folder, ignore_errors=True)

    def jobs(self) -> list[JobState]:
        """The jobs whose nodes listen."""
        found = []
        self._check_owner()
        for folder in sorted(self.state.glob("*")):
            nodes = [pid for path in folder.glob("*.sock") if (pid := _listener(path))]
            if nodes:
                found.append(JobState(folder.name, "process", len(nodes), (folder / "run").resolve()))
        return found

    def remove(self, job_id: str, grace: float) -> None:
        """End the nodes that listen for a job."""
        sockets = list((self.state / job_id).glob("*.sock"))
        pids = {path: pid for path in sockets if (pid := _listener(path))}
        _end(list(pids.values()), grace, lambda pid: any(_listener(path) == pid for path in sockets))
        shutil.rmtree(self.state / job_id, ignore_errors=True)

    def _check_owner(self) -> None:
        if self.state.is_symlink() or (self.state.exists() and self.state.lstat().st_uid != os.getuid()):
            raise EngineError(f"{self.state} belongs to somebody else", "have its owner remove it")

    def _socket(self, node: str) -> str:
        return str(self.folder / f"{node}.sock")

    def _follow(self, rank: int, stub: subprocess.Popen[bytes]) -> None:
        code = stub.wait()
        self.exits.put(Exit(rank, 128 - code if code < 0 else code))

    def _alive(self, pid: int) -> bool:
        return any(node.pid == pid and node.poll() is None for node in self.nodes.values())


def free_port() -> int:
    """A port of the loopback interface that nobody uses, below those that the kernel hands out by itself."""
    for port in random.sample(range(20000, 30000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise EngineError("no free port from 20000 to 30000 on the loopback interface", "see what listens there: ss -ltn")


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


def _end(pids: list[int], grace: float, alive: Callable[[int], bool]) -> None:
    """End processes, gently for `grace` seconds and then by force."""
    deadline = time.monotonic() + grace + 1
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                if alive(pid):
                    os.kill(pid, number)
        while any(map(alive, pids)) and time.monotonic() < deadline:
            time.sleep(0.02)
        deadline += 1
