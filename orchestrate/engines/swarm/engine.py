"""Nodes as tasks of Docker Swarm on several hosts.

Only Swarm's own ports have to be open between hosts, and no daemon listens on the network: we reach nodes through a
relay, a small container on our own host that is on the job's network. Hosts need not share a folder.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterable
from concurrent import futures
from pathlib import Path
from typing import Any, BinaryIO

from orchestrate.engines.base import JobState, never
from orchestrate.engines.connection import ANSWERS, Link, Linked
from orchestrate.engines.docker.image import has_image
from orchestrate.engines.ports import free_port
from orchestrate.engines.swarm import service_spec as parts
from orchestrate.engines.swarm.manager import Manager, Thing, coming, ended, gpus, shared_out, well
from orchestrate.engines.swarm.sync import Mirror, rescued
from orchestrate.engines.swarm.upload import code_files, give, mine, packed, visited
from orchestrate.errors import EngineError, UsageError
from orchestrate.files.paths import code_folder, log
from orchestrate.job.outcomes import LOST, WorkerExit
from orchestrate.job.plan import Inventory, Plan, WorkerPlan, counted
from orchestrate.job.preload import preload
from orchestrate.job.spec import IMAGE, JobSpec
from orchestrate.node.lease import ASKS, LEASE
from orchestrate.node.loop import STUCK

LOOK = 2.0  # seconds between two lists of Swarm's tasks and hosts
SILENT = 6.0  # seconds without a message after which a node counts as not answering
STARTS, PULLS = 120.0, 3600.0  # seconds that Swarm may take to start the nodes, and to pull the image before that
PENDING = 8.0  # seconds that a task may be pending, and in which one that fails to start is replaced
ENDS = 2.0  # seconds that a node whose workers have ended takes to end
BOOTS, AGAIN = 20.0, 2.0  # seconds that a node has to accept a connection, at first and later
TELLS = 25.0  # seconds after which Swarm reports a host that does not answer; it needs 15
STOPS = LEASE + 2 * ASKS + 2 * STUCK  # seconds within which a node that is cut off has killed its workers
RESCUES = 5.0  # seconds that Swarm has to return the last lines of a lost task
CATCHES_UP = 10.0  # seconds that copying the last lines of workers may take
COMES_HOME = 3600.0  # seconds that copying all files of a job may take at its end
HURRIES = 5.0  # seconds for the same if it was asked to stop twice; what is not copied then stays on its nodes
PORTS = "7946/tcp, 7946/udp and 4789/udp must be open between the hosts: python -m orchestrate doctor"
PIPE = ["python", "-I", "-S", "/opt/orchestrate/node/pipe.py"]


class SwarmEngine(Linked):
    """Nodes on the hosts of the Swarm that the user's `docker` manages."""

    name = "swarm"

    def __init__(self) -> None:
        """Connect; raises EngineError if no Swarm manager answers."""
        super().__init__()
        self.swarm = Manager()
        self.files = Path()  # the job's folder here
        self.shared = self.stays = False  # whether nodes share a folder; whether they outlive the job
        self.nodes: dict[str, Thing] = {}  # the task of each node
        self.asked: dict[str, float] = {}  # node: since when an answer is outstanding
        self.linked: dict[str, str] = {}  # node: the id of the task that its connection leads to
        self.said: dict[str, float] = {}  # node: when its last message arrived
        self.first = ""  # the node of rank 0
        self.looked = 0.0
        self.unsure: dict[str, float] = {}  # id of a task that was lost: when its lease is over
        self.kept = contextlib.ExitStack()
        self.code: tuple[BinaryIO, str] | None = None  # as a tar file, and its digest
        self.pool = futures.ThreadPoolExecutor(1)
        self.lost: dict[int, str] = {}  # rank: its node, of workers whose last lines may be missing
        self.supplied: set[str] = set()  # the ids of tasks that have the code
        self.given_up: set[str] = set()  # the ids of tasks that count as lost, since they do not answer
        self.mirror: Mirror | None = None

    def inventory(self, spec: JobSpec, run: Path, prepare: bool) -> Inventory:
        """Check the image; count hosts, cores and GPUs; raises ResourceError if something is missing."""
        if spec.pin or spec.share_gpus:
            raise UsageError("Docker Swarm does not support pin and share_gpus", "leave them out; cpus limits cores")
        has_image(self.swarm.daemon, spec, prepare)
        if spec.image != IMAGE:
            has_image(self.swarm.daemon, JobSpec(), prepare)  # of the relay
        code = code_folder(spec.command)
        code_files(code, run.parent.parent)  # which may be too large
        hosts = self.swarm.takers(spec)
        nodes = spec.trainers + 1
        resources = [host["Description"]["Resources"] for host in hosts]
        smallest = min(one.get("NanoCPUs", 0) for one in resources) // parts.SECOND
        most = math.ceil(nodes / len(hosts))  # nodes on one host
        offered = [gpus(host) for host in hosts] if spec.gpus != "none" else []
        return Inventory(
            engine="swarm",
            about=f"Docker Swarm {self.swarm.info['ServerVersion']} of {counted(len(hosts), 'host')}, "
            f"image {spec.image}",
            cores=tuple(range(max(1, smallest * nodes // most))),
            gpus=(parts.GPU,) * shared_out(offered, nodes, spec.spares),
            no_gpus=f"no host of the Swarm offers the generic resource {parts.GPU}",
            network=spec.network,
            master_addr="",
            interface="",  # each node finds the one that leads to the master
            job_dir=f"{parts.SHARED}/{run.parent.name}" if spec.volume else parts.JOB,
            code=str(code),
            preload=preload(spec, code),
            memory=min(one.get("MemoryBytes", 0) for one in resources),
            hosts=len(hosts),
        )

    def port(self, spec: JobSpec, generation: int) -> int:
        """A port; on the network of the hosts one that is free here, and so probably on the other hosts."""
        return free_port() if spec.network == "host" else 29500 + generation % 1000

    # --- the job

    def up(self, spec: JobSpec, plan: Plan, run: Path, stopped: Callable[[], bool] = never) -> None:
        """Start the nodes that are missing or not healthy, and send them the code."""
        self._settle(spec, plan, run)
        began = time.monotonic()
        found = self._well_nodes()
        old = {task["ID"] for task in self.swarm.tasks() if ended(task)}
        there = {name for name, task in self.nodes.items() if name in found or coming(task)}
        for role, wanted in (("trainer", len(plan.nodes) - 1), ("master", 1)):
            self.swarm.scale(spec, plan, role, wanted - sum(name.startswith(role) for name in there))
        self.swarm.connect(spec)
        while len(found) < len(plan.nodes):
            late = time.monotonic() - began > PENDING
            why = self.swarm.refusal(spec.image, old, impatient=late)
            if why and (late or not self.swarm.replace(spec, plan, old)):
                raise EngineError(*why)
            pulls = any(coming(task) and task["Status"]["State"] == "preparing" for task in self.nodes.values())
            if stopped() or time.monotonic() - began > (PULLS if pulls else STARTS):
                raise EngineError(f"{len(plan.nodes) - len(found)} of {len(plan.nodes)} nodes did not start")
            time.sleep(0.1)
            found = self._well_nodes()
        self._supply(Path(plan.inventory.code), found)

    def alive(self) -> set[str]:
        """The nodes that have the code and run on hosts that are up."""
        return {name for name, task in self._well_nodes().items() if task["ID"] in self.supplied}

    def host(self, node: str) -> str:
        """The name of a node's host."""
        return self.swarm.host(self.nodes[node]) if node in self.nodes else ""

    def adopt(self, spec: JobSpec, plan: Plan, run: Path) -> set[int]:
        """Find the nodes by their services, and ask them for their workers."""
        self._settle(spec, plan, run)
        self.swarm.connect(spec)
        self._well_nodes()
        strangers = self.adopt_workers(plan)
        self._follow(plan.workers)
        return strangers

    def gather(self, stopped: Callable[[], bool]) -> None:
        """Copy all files here: the next generation replaces the files on the nodes by those that are here."""
        if self.mirror:
            self.mirror.catch_up(COMES_HOME, stopped)
            self.mirror.lacks_space()

    def start(self, workers: tuple[WorkerPlan, ...], command: tuple[str, ...]) -> None:
        """Send every node the files of earlier generations, and start the workers."""
        self.first = workers[0].node
        if self.mirror:
            self.mirror.close()
        while {task for task, until in self.unsure.items() if time.monotonic() < until} - self.swarm.dead():
            time.sleep(0.2)  # an older generation may still run on a node that is cut off
        self.unsure, self.asked = {}, {}
        self._well_nodes()
        self._bring(workers)
        for node, task in [(node, self.linked[node]) for node in self.links]:
            if task != self._id(node) or task in self.given_up:  # replaced by a new task, or lost
                self._break(node)
        self._follow(workers)
        super().start(workers, command)

    def wait(self, timeout: float) -> list[WorkerExit]:
        """The workers that have ended; waits until the last lines of their logs are here."""
        exits = super().wait(timeout)
        if exits and self.mirror and not self.running:
            self.mirror.catch_up(CATCHES_UP)
            self._rescue()
        if self.running and time.monotonic() - self.looked > LOOK:
            self.looked = time.monotonic()
            self._well_nodes()
            self.broken |= set(self.running.values()) - self.links.keys()
            for node in filter(self._gone, list(self.links)):
                self._break(node)
            for node, since in list(self.asked.items()):
                if time.monotonic() - since > TELLS:  # Swarm reports nothing either: only the nodes' network is cut
                    self._give_up(node)
            self._tell("status")  # the answer is a sign of life
            self.asked = dict.fromkeys(self.links, time.monotonic()) | self.asked
        return exits

    def explain(self, end: WorkerExit, node: str) -> str:
        """The cause, from what its node has reported, or from the state of its task and host."""
        sign = self.signs.get(end.rank)
        if sign == "oom":
            return "out of memory" if end.code == LOST else "out of memory in a child"
        if sign is not None:  # its node is alive, or has reported that it ends
            return {"cut off": "host lost", "ending": "node stopped"}.get(sign, "")
        deadline = time.monotonic() + TELLS
        while True:
            task = self.swarm.look().get(node)
            if task and (not self.swarm.answers(task) or task["ID"] in self.given_up):
                return "host lost"
            if not task or not well(task):
                return "node lost"
            if node in self.links or time.monotonic() > deadline:
                return "" if node in self.links else "host lost"
            time.sleep(0.2)

    def warnings(self) -> list[str]:
        """Requests that nodes have refused, and files of them that cannot be copied."""
        return super().warnings() + (self.mirror.warnings() if self.mirror else [])

    def troubles(self) -> dict[str, str]:
        """Nodes that do not answer; if their host is lost, Swarm reports it later."""
        now = time.monotonic()
        return {node: "silent" for node in self.running.values() if now - self.asked.get(node, now) > SILENT}

    def discard(self, nodes: Iterable[str]) -> None:
        """Give nodes up; Swarm cannot remove a single task, so they are removed at the end."""
        for name in nodes:
            self._give_up(name)

    def down(self, grace: float, stopped: Callable[[], bool] = never) -> None:
        """Copy all files here, then remove services, network and relay."""
        if self.mirror:
            if self.links:  # the last files are most likely here already
                self.mirror.come_home(*((COMES_HOME, stopped) if grace else (HURRIES, never)))
                for node in self.mirror.silent() & self._well_nodes().keys():
                    raise EngineError(f"the files of {node} could not be copied: it does not answer", PORTS)
            self.refusals += self.mirror.warnings()
            self.mirror.close()
            self.mirror = None
        if self.stays:
            self._clean(self._well_nodes())
        elif self.swarm.home:
            self.remove(self.swarm.home, grace)

    def jobs(self) -> list[JobState]:
        """The jobs that have services here."""
        return self.swarm.jobs()

    def holds(self, job_id: str) -> list[str]:
        """Services, relay, network and secret of a job."""
        return [f"{kind} {name}" for kind, name, _ in self.swarm.things(job_id)]

    def remove(self, job_id: str, grace: float) -> None:
        """Remove everything with the job's label, and wait until Swarm has released it."""
        known = set(self.links)
        self._tell("end")  # a task that Swarm itself ends takes four seconds, of which it only waits for two
        deadline = time.monotonic() + grace + ENDS
        while known & self._well_nodes().keys() and time.monotonic() < deadline:
            self._listen(0.1)
        for node in list(self.links):
            self._break(node)
        self.swarm.remove(job_id, grace)

    # --- details

    def _settle(self, spec: JobSpec, plan: Plan, run: Path) -> None:
        self.stays, self.shared = bool(plan.inventory.cluster), bool(spec.volume)
        self.files = run / plan.job_id if self.stays and plan.home != plan.job_id else run
        self._take_key(run)
        self.swarm.settle(plan, run, spec, self.key)
        self.swarm.prepare(spec)

    def _well_nodes(self) -> dict[str, Thing]:
        self.nodes = self.swarm.look()
        return {
            name: task
            for name, task in self.nodes.items()
            if well(task) and self.swarm.answers(task) and task["ID"] not in self.given_up
        }

    def _end(self, ranks: Iterable[int]) -> None:
        ranks = list(ranks)
        self.lost |= {rank: self.running[rank] for rank in ranks if rank in self.running}
        super()._end(ranks)
        for node in {self.lost[rank] for rank in ranks if rank in self.lost}:
            if node in self.nodes:
                self.unsure[self.nodes[node]["ID"]] = self.said.get(node, time.monotonic()) + STOPS

    def _id(self, node: str) -> str:
        """The id of a node's task, when last listed."""
        return str(self.nodes[node]["ID"]) if node in self.nodes else ""

    def _gone(self, node: str) -> bool:
        """Whether the task of a node has ended or its host is down, when last listed."""
        task = self.nodes.get(node)
        return task is not None and (ended(task) or not self.swarm.answers(task))

    def _give_up(self, node: str) -> None:
        """Give a node up, and close its connection."""
        self.asked.pop(node, None)
        if node in self.nodes:
            self.given_up.add(self.nodes[node]["ID"])
        if node in self.links:
            self._break(node)

    def _rescue(self) -> None:
        """Complete the logs of lost workers from Swarm's log, if it answers soon."""
        lost, self.lost = self.lost, {}
        tasks = self.swarm.look() if lost else {}
        for rank, node in lost.items():
            task, path = tasks.get(node), self.files / log(rank)
            asked = self.pool.submit(self.swarm.output, task) if task and self.swarm.answers(task) else None
            with contextlib.suppress(futures.TimeoutError, OSError), path.open("r+b") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - (1 << 16)))
                file.write(rescued(file.read(), asked.result(RESCUES) if asked else b"", rank))

    def _runs(self, node: str) -> bool:
        """Whether its task runs, though the connection to it has ended."""
        return node in self._well_nodes()

    _exists = _runs

    def _connect(self, node: str) -> Link | None:
        self.linked[node] = self._id(node)
        return self.reach(node)

    def reach(self, node: str) -> Link | None:
        """Connect to a node through the relay, and send it the relay's address for its lease."""
        task, relay = self.nodes.get(node), self.swarm.relay
        if task is None or relay is None or task["ID"] in self.given_up:
            return None
        address, port = self.swarm.node_address(task)
        patience = AGAIN if task["ID"] in self.supplied else BOOTS
        command = [*PIPE, address, str(port), str(patience)]
        if link := self.swarm.daemon.talk(str(relay.id), command, self.key, patience + ANSWERS):
            link.send("lease", relay=self.swarm.relay_address())
        return link

    def _heard(self, node: str, message: dict[str, Any]) -> None:
        self.asked.pop(node, None)
        self.said[node] = time.monotonic()
        super()._heard(node, message)

    def _request(self, worker: WorkerPlan) -> dict[str, Any]:
        env = worker.env
        if self.swarm.network == "host":  # nodes have no host names there
            env = env | {"MASTER_ADDR": self.swarm.node_address(self.nodes[self.first])[0]}
        path = self.files / log(worker.rank)
        length = path.stat().st_size if path.exists() else 0
        return {"env": env, "inherit": True, "cwd": parts.CODE, "log": length}

    def _each(self, nodes: Iterable[str], act: Callable[[Link], None]) -> list[EngineError]:
        """Call `act` with a new connection to each node, in parallel; give up nodes where it fails."""

        def reached(node: str) -> Link:
            if link := self.reach(node):
                return link
            raise EngineError(f"no connection to {node} on {self.host(node)}", PORTS)

        failed = visited(nodes, reached, act)
        self.given_up |= {self.nodes[node]["ID"] for node in failed}
        return [*failed.values()]

    def _supply(self, code: Path, nodes: Iterable[str]) -> None:
        """Send the code, as it was at the first call, to nodes without it; raises EngineError, ResourceError."""
        if self.code is None:
            run = self.swarm.run.parent
            self.code = self.kept.enter_context(packed(code, code_files(code, run.parent), run))
        file, digest = self.code

        def act(link: Link) -> None:
            if link.converse("status")["tags"].get(parts.CODE) != digest:
                give(link, parts.CODE, file, digest)

        for error in self._each(nodes, act):
            raise error
        self.supplied |= {self.nodes[name]["ID"] for name in nodes}

    def _bring(self, workers: tuple[WorkerPlan, ...]) -> None:
        """Send every node the files of earlier generations, unless all nodes share a folder."""
        folder, files = workers[0].env["JOB_DIR"], mine(self.files)
        if self.shared or not files:
            return
        facts = {str(path.relative_to(self.files)): path.stat() for path in files if not path.is_symlink()}
        here = {path: [status.st_size, status.st_mtime_ns] for path, status in facts.items()}
        with packed(self.files, files, self.swarm.run.parent) as (file, digest):

            def act(link: Link) -> None:
                there = link.converse("news", folder=folder, have={})["files"]
                same = {path: told[:2] for path, told in there.items()} == here  # it has written all of them
                if not same and link.converse("status")["tags"].get(folder) != digest:
                    give(link, folder, file, digest)

            self._each(dict.fromkeys(worker.node for worker in workers), act)

    def _follow(self, workers: tuple[WorkerPlan, ...]) -> None:
        """Copy the files of nodes here from now on."""
        ranks: dict[str, list[int]] = {}
        for worker in workers:
            ranks.setdefault(worker.node, []).append(worker.rank)
        if self.mirror:
            self.mirror.close()
        self.mirror = Mirror(self.files, workers[0].env["JOB_DIR"], ranks, self.reach)
