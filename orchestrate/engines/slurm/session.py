"""Nodes of a job in its allocation: one task of Slurm on each machine, reached over TCP."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from orchestrate import console
from orchestrate.clock import Clock, wait_until
from orchestrate.engines.base import Observed, never
from orchestrate.engines.client_session import ClientSession, key_of
from orchestrate.engines.connection import ANSWER_TIMEOUT, NodeConnection
from orchestrate.engines.node_clients import NodeClients
from orchestrate.engines.slurm import addresses, image
from orchestrate.errors import AllocationLost, EngineError
from orchestrate.files.folder import regular, replacing_links
from orchestrate.files.paths import NODE
from orchestrate.host import records, slurm
from orchestrate.node.lease import bound, relay
from orchestrate.node.messages import protocol
from orchestrate.plan.container import UNBUFFERED
from orchestrate.plan.plan import Plan, WorkerPlan
from orchestrate.record.outcomes import TERMINATED_EXIT_CODE, WorkerExit
from orchestrate.record.paths import JobPaths
from orchestrate.spec.causes import Reason
from orchestrate.spec.spec import JobSpec

START_TIMEOUT = 120.0  # seconds for nodes to start; a shared folder may show their addresses late
CONNECT_TIMEOUT = 2.0  # seconds for a node to accept a connection
ASK_INTERVAL, SILENT_AFTER, LOST_AFTER = 2.0, 6.0, 12.0  # seconds between two questions, and without an answer
# Seconds until a node that is cut off has killed its workers.
LEASE_OVER_AFTER = protocol.LEASE_TIMEOUT + 2 * protocol.RENEW_INTERVAL + 2 * protocol.SEND_TIMEOUT
LAST_WORDS = 1 << 16  # bytes of what nodes print that are searched for the reason why they did not start
OF_NODES = ("addresses", "secrets")  # folders in the run directory
KEPT = ("SLURM_JOB_ID", "SLURM_CONF")  # all others would narrow what srun starts
SRUN = (
    *("srun", "--overlap", "--ntasks-per-node=1", "--kill-on-bad-exit=0", "--wait=0", "--no-kill"),
    *("--mem=0", "--cpu-bind=none", "--input=none", "--quiet"),
)


class SlurmSession(ClientSession):
    """The nodes of one job; only inside of its allocation."""

    def __init__(
        self,
        spec: JobSpec,
        plan: Plan,
        run: Path,
        warn: Callable[[str], None],
        evict: Callable[[], None],
        clock: Clock,
    ) -> None:
        """`run` is the job folder; `evict` is called once Slurm ends the allocation. Raises EngineError."""
        self.evict = evict
        self.spec, self.key, self.clock, self.paths = spec, key_of(run), clock, JobPaths(run.parent)
        self.secrets, self.python = str(self.paths.root / "secrets"), plan.placement.python
        self.workdir = plan.placement.cwd(plan.placement.code)
        self.clients = NodeClients(self, warn, self._heard)
        self.nodes: dict[str, addresses.Address] = {}
        self.steps: list[subprocess.Popen[bytes]] = []
        self.first = ""  # node of rank 0
        self.asked: dict[str, float] = {}  # node: time of the first unanswered request
        self.last_asked = 0.0
        self.silent: dict[str, float] = {}  # host of a node that stopped answering: time when its lease has expired
        self.lost: set[str] = set()  # nodes that were lost with their hosts
        self.doubtful: set[str] = set()  # hosts on which a node has ended, or did not start
        self.failed = False  # whether a worker of this generation has ended with another exit code than 0
        self.relay = 0  # port at which this process renews leases

    def up(self, plan: Plan, stopped: Callable[[], bool] = never) -> None:
        """Start a node on a free machine of the allocation for each that is missing."""
        alive = self.alive()
        if not (missing := [name for name in plan.nodes if name not in alive]):
            return  # asking Slurm takes some 20 ms
        for host in self.doubtful:
            if not slurm.answers(host):
                self.silent[host] = self.clock.monotonic()  # its workers have ended with it
        self.doubtful = set()
        free = [host for host in self._hosts() if host not in {*alive.values(), *self.silent}]
        if free:
            self._start_nodes(missing[: len(free)], free, plan, stopped)
        if lacking := missing[len(free) :]:
            raise AllocationLost(f"no machine of the allocation is free for {', '.join(lacking)}")

    def _start_nodes(self, names: list[str], hosts: list[str], plan: Plan, stopped: Callable[[], bool]) -> None:
        count, launch = str(len(names)), secrets.token_hex(8)
        if not self.relay:
            sock = bound()
            self.relay = sock.getsockname()[1]
            threading.Thread(target=relay, args=(self.key, sock), daemon=True).start()
        try:
            with records.pinned(self.paths.root) as run:
                for name in OF_NODES:
                    if (run / name).is_symlink():  # which came with a project
                        (run / name).unlink()
                    (run / name).mkdir(mode=0o700, exist_ok=True)
            ours = {key: value for key, value in os.environ.items() if key in KEPT or not key.startswith("SLURM_")}
            env = ours | {"NODE_MODE": "agent", "NODE_KEY": self.key.hex(), "NODE_SOCKET": "", "NODE_LAUNCH": launch}
            env |= {"NODE_ADDRESSES": str(self.paths.addresses), "NODE_NAMES": " ".join(names)}
            env |= {"NODE_GRACE": str(self.spec.grace), "NODE_PRELOAD": " ".join(plan.placement.preload)}
            where = [f"--nodes={count}", f"--ntasks={count}", f"--nodelist={','.join(hosts[: len(names)])}"]
            node = [self.python, "-I", f"-Xutf8={sys.flags.utf8_mode}", str(NODE)]
            words = [*SRUN, *where, *image.before(self.spec, self.paths, self.workdir), *node]
            with open(path := self.paths.root / "nodes.log", "ab", opener=replacing_links) as log:
                size = log.tell()
                step = subprocess.Popen(words, env=env, cwd=self.workdir, stdout=subprocess.DEVNULL, stderr=log)
        except OSError as error:
            raise EngineError(f"cannot start nodes: {error}") from None
        self.steps.append(step)
        deadline = self.clock.monotonic() + START_TIMEOUT
        while wanted := [name for name in names if not self._found(name, launch)]:
            if step.poll() is not None or stopped() or self.clock.monotonic() > deadline:
                step.terminate()
                self.doubtful |= {*hosts[: len(names)]}
                raise EngineError(f"{', '.join(wanted)} did not start{_last_words(path, size)}", f"see {path}")
            self.clock.sleep(0.05)

    def _found(self, name: str, launch: str) -> bool:
        """Whether a node has written its address in this launch."""
        if found := addresses.read(self.paths.addresses, name, launch):
            self.nodes[name] = found
        return found is not None

    def _hosts(self) -> list[str]:
        """Return the machines of the allocation, the one of this process first."""
        job = os.environ.get("SLURM_JOB_ID", "")
        names = slurm.state(job, fresh=True).hosts or os.environ.get("SLURM_JOB_NODELIST", "")
        hosts = slurm.call("scontrol", "show", "hostnames", names).split()
        own = os.environ.get("SLURMD_NODENAME", "")
        return sorted(hosts, key=lambda host: host != own)

    def alive(self) -> dict[str, str]:
        """Return the nodes that accept connections, with their machines."""
        return {name: node.host for name, node in list(self.nodes.items()) if self.runs(name)}

    def adopt(self, plan: Plan) -> set[int]:
        """Take over no workers: the nodes of an earlier allocation have ended with it."""
        return self.clients.adopt(plan)

    def start(self, plan: Plan, stopped: Callable[[], bool] = never) -> None:
        """Start the workers, once those on machines that are cut off have lost their lease."""
        self.first, self.asked, self.failed = plan.workers[0].node, {}, False
        wait_until(lambda: stopped() or self.clock.monotonic() > max(self.silent.values(), default=0), 60, self.clock)
        self.clients.start(plan)

    def wait(self, timeout: float) -> Observed:
        """Wait for exits of workers, and ask their nodes at intervals whether they are there."""
        exits, now = self.clients.wait(timeout), self.clock.monotonic()
        self.failed |= any(end.code for end in exits)
        if exits and not (self.clients.running or self.failed) and self._is_leaving():  # and has told workers, too
            self.evict()
        for node in [node for node, since in self.asked.items() if now - since > LOST_AFTER]:
            self._abandon(node)
        if self.clients.running and now - self.last_asked > ASK_INTERVAL:
            self.last_asked = now
            self.clients.broken |= {*self.clients.running.values()} - self.clients.connections.keys()
            self.clients.broadcast(protocol.GetStatus())
            self.asked = dict.fromkeys(self.clients.connections, now) | self.asked
        silent = [node for node, since in self.asked.items() if now - since > SILENT_AFTER]
        return Observed(exits, self.clients.starting(), dict.fromkeys(silent, "silent"))

    def _heard(self, node: str) -> None:
        self.asked.pop(node, None)

    def _abandon(self, node: str) -> None:
        """Count a node as lost that does not answer, with its machine."""
        self.asked.pop(node, None)
        self.lost.add(node)
        if found := self.nodes.pop(node, None):
            self.silent[found.host] = self.clock.monotonic() + LEASE_OVER_AFTER
        if node in self.clients.connections:
            self.clients.drop(node)

    def _forget(self, node: str) -> None:
        """Count a node as ended, and its machine as one to ask before it gets the next."""
        if found := self.nodes.pop(node, None):
            self.doubtful.add(found.host)

    def explain(self, end: WorkerExit, node: str) -> Reason | None:
        """Return the cause: the node or its machine was lost, or the kernel killed a process for lack of memory."""
        if why := self.clients.out_of_memory(end):
            return why
        if end.code == TERMINATED_EXIT_CODE and self._is_leaving():  # its signal reaches nodes and workers, too
            self.evict()
            return Reason.TERMINATED
        hint = self.clients.exit_hints.get(end.rank)
        if hint is not None:
            return {"cut off": Reason.HOST_LOST, "ending": Reason.NODE_STOPPED}.get(hint)
        if node in self.clients.connections:
            return None
        if not self.steps:  # of an earlier allocation
            return Reason.HOST_LOST
        return Reason.HOST_LOST if node in self.lost else Reason.NODE_LOST

    def _is_leaving(self) -> bool:
        with contextlib.suppress(EngineError):
            return slurm.is_leaving(slurm.facts(os.environ.get("SLURM_JOB_ID", "")))
        return False

    def discard(self, nodes: Iterable[str]) -> None:
        """Kill what runs on nodes, and end them."""
        for name in list(nodes):
            if name in self.clients.connections:
                self.clients.connections[name].send(protocol.Stop(kill=True, leftovers=True))
                self.clients.connections[name].send(protocol.End())
                self.clients.drop(name)
            self._forget(name)

    def down(self, grace: float, stopped: Callable[[], bool] = never) -> None:
        """End the nodes, and their tasks."""
        self.clients.connect(self.nodes)
        self.clients.broadcast(protocol.End())
        wait_until(lambda: self._have_ended() or not self.alive(), grace + 1, self.clock, 0.1)
        for number in (signal.SIGTERM, signal.SIGKILL):  # srun waits for a machine that is lost
            if not wait_until(self._have_ended, 1.0, self.clock):
                for step in self.steps:
                    step.send_signal(number)
        self.nodes, self.steps = {}, []
        with contextlib.suppress(OSError), records.pinned(self.paths.root) as run:
            for name in OF_NODES:
                shutil.rmtree(run / name, ignore_errors=True)

    def _have_ended(self) -> bool:
        return all(step.poll() is not None for step in self.steps)

    # --- access to nodes, for their connections

    def connect(self, node: str) -> NodeConnection | None:
        """Connect to a node; None if it does not listen, or is not the node of this job."""
        try:
            found = self.nodes[node]
            sock = socket.create_connection(found, CONNECT_TIMEOUT)
        except (OSError, KeyError):
            return None
        link = NodeConnection(sock, self.key)
        if not link.greet(ANSWER_TIMEOUT):
            return None
        link.send(protocol.Lease((sock.getsockname()[0], self.relay)))  # where this machine is for that one
        return link

    def runs(self, node: str) -> bool:
        """Whether a node accepts connections; one whose machine does not answer counts as lost with that."""
        try:
            socket.create_connection(self.nodes[node], CONNECT_TIMEOUT).close()
            return True
        except ConnectionRefusedError:
            self._forget(node)
        except OSError:
            self._abandon(node)
        except KeyError:
            pass
        return False

    may_recover = runs

    def request(self, worker: WorkerPlan, command: tuple[str, ...]) -> protocol.Start:
        """Build a request with the worker's environment, which its node adds to its own."""
        env = UNBUFFERED | worker.env | {"MASTER_ADDR": self.nodes[self.first].host}
        return protocol.Start([*command], env, inherit=True, cwd=self.workdir)


def _last_words(path: Path, start: int) -> str:
    """Return the last line from `start` that is not srun's, which only says that its tasks have ended."""
    with contextlib.suppress(OSError), regular(path) as file:
        file.seek(start)
        lines = console.clean(file.read(LAST_WORDS).decode(errors="replace")).split("\n")
        if said := [line.strip() for line in lines if line.strip() and not line.startswith("srun: ")]:
            return f": {console.shortened(said[-1], 300)}"
    return ""
