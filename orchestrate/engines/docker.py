"""Nodes as containers: Compose brings them up, the Docker SDK finds them by label and runs the job in them."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import docker.errors
from docker.models.containers import Container

from orchestrate.engines import LOST, Doing, Exit, JobState, knows
from orchestrate.engines.daemon import ERRORS, Daemon, Events, name_of, reason, within
from orchestrate.engines.image import inventory
from orchestrate.engines.ports import free_port
from orchestrate.errors import EngineError, EngineLost
from orchestrate.node.stub import WORKER_KILLED
from orchestrate.paths import PROJECT
from orchestrate.plan import Inventory, Plan, WorkerPlan
from orchestrate.spec import JobSpec

LABEL = "orchestrate.job"
RECONCILE = 2.0  # seconds between two looks at the truth, in case the event stream has lost something
SHUTDOWN = 3.0  # seconds within which a daemon that ends all containers has gone itself
ANSWERS = 10.0  # seconds that a node may take to tell of its workers
SIGNS = 0.2  # seconds after a worker's end in which the engine tells what happened around it
DYING = 5.0  # seconds that a container takes to die, at most
HOST_NETWORK = Path(__file__).with_name("host-network.yml")
STUB = ["python", "-I", "-S", "/opt/orchestrate/node/stub.py"]


class DockerEngine:
    """Nodes on the Docker Engine that the user's `docker` talks to, too."""

    def __init__(self) -> None:
        """Connect; raises EngineError where no engine answers."""
        self.daemon = Daemon()
        self.client, self.info = self.daemon.client, self.daemon.info
        self.home, self.network = "", ""  # the name under which the job's nodes exist
        self.stays = False  # whether they outlive the job
        self.env: dict[str, str] = {}
        self.nodes: dict[str, Container] = {}
        self.execs: dict[str, tuple[int, str]] = {}  # exec id: rank and the id of its container
        self.ended: list[Exit] = []  # known already, without an event
        self.heard: dict[int, float] = {}  # rank: when its end was heard of, by the monotonic clock
        self.events: Events | None = None
        self.signs: dict[str, set[str]] = {}  # container id: what events have said of it
        self.dying: set[str] = set()  # ids of containers that look well, but are ending
        self.trouble: dict[str, str] = {}  # node: paused or partition
        self.looked = 0.0

    def inventory(self, spec: JobSpec, run: Path, prepare: bool) -> Inventory:
        """Check the image, list the GPUs; raises ResourceError for what is missing."""
        return inventory(self.daemon, spec, prepare)

    def port(self, spec: JobSpec, generation: int) -> int:
        """Where a job has a network to itself, only its own last generation could still hold a port."""
        return free_port() if spec.network == "host" else 29500 + generation % 1000  # torch's default first

    # --- the job

    def up(self, spec: JobSpec, plan: Plan, run: Path) -> None:
        """Have Compose bring up the nodes that are not there, or not well."""
        self._settle(spec, plan, run)
        if len(self._well_nodes()) >= len(plan.nodes):
            return
        self._mend()
        scale = f"trainer={len(plan.nodes) - 1}"
        arguments = ("--detach", "--no-build", "--no-recreate", "--pull", "never", "--scale", scale)
        self._project("up", *arguments, "master", "trainer")
        missing = len(plan.nodes) - len(self._well_nodes())
        if missing > 0:
            raise EngineError(f"Compose did not bring up {missing} of {len(plan.nodes)} nodes", "see docker compose ls")

    def _mend(self) -> None:
        """Leave only containers that run well, and ended ones, which Compose starts again."""
        found = self._look().values()
        self.daemon.each((node for node in found if node.status != "exited" and not self._well(node)), Container.kill)
        with self.daemon.asking("does not connect a node"):
            for network in self.client.networks.list(names=[self.network]):
                for node in found:
                    if self.network not in node.attrs["NetworkSettings"]["Networks"]:
                        network.connect(node, aliases=[node.attrs["Labels"]["com.docker.compose.service"]])

    def _well_nodes(self) -> dict[str, Container]:
        self.nodes = {name: node for name, node in self._look().items() if self._well(node)}
        return self.nodes

    def alive(self) -> set[str]:
        """The nodes that run, and are neither paused nor cut off."""
        return {name for name, node in self._look().items() if self._well(node)}

    def adopt(self, spec: JobSpec, plan: Plan, run: Path) -> set[int]:
        """Find the nodes by their label, and ask them for the workers."""
        self._settle(spec, plan, run)
        self.nodes = self._look()
        self.execs, self.ended = {}, []
        states = {name: self._status(name) for name in {worker.node for worker in plan.workers}}
        strangers = set()
        for worker in plan.workers:
            state, node = states[worker.node], self.nodes.get(worker.node)
            if state is None and node is not None and node.status in ("running", "paused"):
                raise EngineLost(f"{worker.node} {'is paused' if node.status == 'paused' else 'does not answer'}")
            if state is None:
                self.ended.append(Exit(worker.rank, LOST))
            elif knows(state, plan.generation, worker.rank):
                self._exec(worker.rank, worker.node, ["watch", str(worker.rank)], {})
            else:
                strangers.add(worker.rank)
        return strangers

    def start(self, workers: tuple[WorkerPlan, ...], command: tuple[str, ...]) -> None:
        """Start a stub in each worker's node, which has the node start the worker and ends with its code."""
        self.execs, self.ended, self.signs = {}, [], {}

        def start(worker: WorkerPlan) -> None:
            self._exec(worker.rank, worker.node, ["worker", *command], worker.env)

        start(workers[0])
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(start, workers[1:]))

    def wait(self, timeout: float) -> list[Exit]:
        """The workers whose stub has ended, by the event stream or, when that is silent, by a look at the truth."""
        exits, self.ended = self.ended, []
        assert self.events is not None
        for event in self.events.wait(0 if exits else timeout):
            exits += self._read(event)
        if self.execs and time.monotonic() - self.looked > RECONCILE:
            exits += self._reconcile()
            self.looked = time.monotonic()
        return exits

    def explain(self, end: Exit, node: str) -> str:
        """Tell what events have said of the worker's container, and whether it runs."""
        late = self.wait(max(0.0, self.heard.get(end.rank, 0.0) + SIGNS - time.monotonic()))
        self.ended = late + self.ended
        container = self.nodes.get(node)
        signs = self.signs.get(str(container.id), set()) if container else set()
        found = self._look()
        if not any(container.status == "running" for container in found.values()):
            self._expect_shutdown()
        runs = node in found and found[node].status == "running"
        if "oom" in signs:
            return "out of memory in a child" if runs and end.code != LOST else "out of memory"
        if "kill" in signs or "destroy" in signs:
            return "node stopped"
        if not runs:
            return "node lost"
        return "" if self._well(found[node]) else "partition"

    def troubles(self) -> dict[str, str]:
        """What events, and the last look at the truth, have told."""
        return dict(self.trouble)

    def doing(self) -> dict[int, Doing]:
        """Ask the nodes."""
        found = {}
        for name in self.alive():
            for rank, doing in (self._status(name) or {}).get("running", {}).items():
                found[int(rank)] = Doing(doing["state"], doing["cpu"])
        return found

    def dump(self) -> None:
        """Have all workers print their stacks, and abort."""
        self.daemon.each(self.nodes.values(), lambda node: node.kill("SIGQUIT"))

    def stop(self, kill: bool) -> None:
        """Ask all workers to stop, or kill them."""
        self.daemon.each(self.nodes.values(), lambda node: node.kill("SIGUSR2" if kill else "SIGUSR1"))

    def discard(self, nodes: Iterable[str]) -> None:
        """Remove containers by force."""
        found = [self.nodes[name] for name in nodes if name in self.nodes]
        self.daemon.each(found, lambda node: node.remove(force=True, v=True))

    def down(self, grace: float) -> None:
        """Remove nodes and network; of a cluster, have the nodes make themselves ready for another job."""
        if self.events is not None:
            self.events.close()
        if self.stays:
            self.daemon.each(self.nodes.values(), lambda node: node.kill("SIGHUP"))
        elif self.home:
            self.remove(self.home, grace if self.execs else 0)  # an idle node has nothing to end

    # --- from another shell

    def jobs(self) -> list[JobState]:
        """The jobs that have containers, by their labels."""
        jobs: dict[str, list[Container]] = {}
        for container in self.daemon.containers(LABEL):
            jobs.setdefault(container.attrs["Labels"][LABEL], []).append(container)
        states = []
        for job, nodes in sorted(jobs.items()):
            labels = nodes[0].attrs["Labels"]
            run, owner = Path(labels.get("orchestrate.run", "")), int(labels.get("orchestrate.owner") or -1)
            states += [JobState(job, "docker", len(nodes), run, owner)] if job else []  # else plain Compose
        return states

    def holds(self, job_id: str) -> list[str]:
        """Containers and networks that carry the job's label."""
        label = f"{LABEL}={job_id}"
        with self.daemon.asking("does not list its networks"):
            networks = [f"network {network.name}" for network in self.client.networks.list(filters={"label": label})]
        return sorted(f"container {name_of(container)}" for container in self.daemon.containers(label)) + networks

    def remove(self, job_id: str, grace: float) -> None:
        """Stop and remove containers and networks that carry the job's label, and nothing else."""
        label = f"{LABEL}={job_id}"
        nodes = self.daemon.containers(label)
        if grace:
            self.daemon.each(nodes, lambda node: node.stop(timeout=int(grace)))
        self.daemon.each(nodes, lambda node: node.remove(force=True, v=True))
        with self.daemon.asking(f"keeps a network of {job_id}"):
            for network in self.client.networks.list(filters={"label": label}):
                network.remove()

    # --- details

    def _settle(self, spec: JobSpec, plan: Plan, run: Path) -> None:
        """Know the job, and listen to what happens to it."""
        code = plan.inventory.code
        for path in (str(run), code):
            if ":" in path:
                raise EngineError(f"Compose cannot mount {path}, for the colon in it", "take a folder without a colon")
        self.home, self.network, self.stays = plan.home, f"{plan.home}_job", bool(plan.inventory.cluster)
        if spec.network == "host":
            self.network = "host"
        self.env = {
            "JOB_ID": self.home,
            "JOB_OWNER": str(os.getuid()),
            "NODE_MODE": "wait",
            "NODE_IMAGE": spec.image,
            "NODE_CODE": code,
            "NODE_JOB_DIR": str(run),
            "NODE_USER": self._user(run),
            "NODE_RUNTIME": "nvidia" if plan.gpus else self.info["DefaultRuntime"],
            "NODE_GPUS": ",".join(plan.gpus) or "void",
            "NODE_SHM": spec.shm_size,
            "NODE_MEMORY": spec.memory or "0",
            "NODE_CPUS": str(spec.cpus or 0),
            "NODE_GRACE": str(spec.grace),
            "NODE_PRELOAD": " ".join(plan.inventory.preload),
        }
        if self.events is None:
            self.events = Events(self.daemon, self._ours)

    def _user(self, run: Path) -> str:
        """Whoever owns the run directory; a rootless engine's root is that very person."""
        if any("rootless" in option for option in self.info.get("SecurityOptions") or []):
            return "0:0"
        owner = run.stat()
        return f"{owner.st_uid}:{owner.st_gid}"

    def _look(self) -> dict[str, Container]:
        """The job's containers by the names of their nodes; one that is dying is waited for."""
        deadline = time.monotonic() + DYING
        while True:
            found = {_node_name(node): node for node in self.daemon.containers(f"{LABEL}={self.home}")}
            if time.monotonic() > deadline or not any(
                node.id in self.dying and node.status == "running" for node in found.values()
            ):
                self.dying = set()
                return found
            time.sleep(0.02)

    def _well(self, container: Container) -> bool:
        """Whether it runs, not paused, on the job's network."""
        networks = container.attrs["NetworkSettings"]["Networks"]
        return container.status == "running" and self.network in networks

    def _status(self, node: str) -> dict[str, Any] | None:
        """What a node knows of its workers; None of a node that does not answer."""
        container = self.nodes.get(node)
        if container is None or container.status != "running":
            return None
        try:
            done = within(ANSWERS, lambda: container.exec_run([*STUB, "status"], stderr=False))
            status = json.loads(done.output) if done is not None and done.exit_code == 0 else None
        except docker.errors.APIError:
            return None
        except ERRORS as error:
            raise EngineLost(f"the engine does not answer: {reason(error)}") from None
        except ValueError:
            return None
        return status if isinstance(status, dict) else None

    def _exec(self, rank: int, node: str, words: list[str], env: dict[str, str]) -> None:
        """Start a stub that stands for a worker; on a node that has gone, the worker has ended."""
        container = self.nodes.get(node)
        if container is None:
            self.ended.append(Exit(rank, LOST))
            return
        with self.daemon.asking(f"does not start rank {rank} on {node}"):
            try:
                api = self.client.api
                made = api.exec_create(container.id, [*STUB, *words], environment=env, stdout=False, stderr=False)["Id"]
                self.execs[made] = rank, str(container.id)
                api.exec_start(made, detach=True)
            except docker.errors.APIError as error:
                if error.status_code not in (404, 409):
                    raise
                self.execs = {key: value for key, value in self.execs.items() if value[0] != rank}
                self.ended.append(Exit(rank, LOST))

    def _ours(self, event: dict[str, Any]) -> bool:
        attributes = event["Actor"]["Attributes"]
        return self.home in (attributes.get(LABEL), attributes.get("name", "").removesuffix("_job"))

    def _read(self, event: dict[str, Any]) -> list[Exit]:
        """What an event tells: the end of a worker, or that it is time to look at the truth."""
        action, actor, attributes = event["Action"], event["Actor"]["ID"], event["Actor"]["Attributes"]
        if action == "exec_die":
            return self._ended(attributes["execID"], int(attributes["exitCode"]))
        if action.startswith("exec_create") and attributes["execID"] in self.execs:
            self.signs.pop(actor, None)  # they were of an earlier life of this container
        elif action in ("oom", "destroy", "die") or (action == "kill" and attributes.get("signal") in ("9", "15")):
            self.signs.setdefault(actor, set()).add(action)
            if action == "die":
                self.dying.discard(actor)
            elif action == "kill":
                self.dying.add(actor)
        if event["Type"] == "network" or action in ("pause", "unpause", "die"):
            self.looked = 0.0
        return []

    def _reconcile(self) -> list[Exit]:
        """Look at the truth: which stubs have ended, and which nodes are in trouble."""
        exits: list[Exit] = []
        forgotten = set()
        for key in list(self.execs):
            with self.daemon.asking("does not tell of a worker"):
                try:
                    state = self.client.api.exec_inspect(key)
                    if not state["Running"] and state["ExitCode"] is not None:
                        exits += self._ended(key, state["ExitCode"])
                except docker.errors.NotFound:  # its container has gone; or the daemon, which was another one then
                    forgotten.add(key)
        found = self._look()
        alive = {str(node.id) for node in found.values() if node.status in ("running", "paused")}
        for key, (_, container) in list(self.execs.items()):
            if container in alive and key in forgotten and "die" not in self.signs.get(container, set()):
                raise EngineLost("the engine was restarted")
            if container not in alive or key in forgotten:
                exits += self._ended(key, LOST)
        self.trouble = {name: "paused" for name, node in found.items() if node.status == "paused"}
        cut_off = [name for name, node in found.items() if node.status == "running" and not self._well(node)]
        self.trouble |= dict.fromkeys(cut_off, "partition")
        return exits

    def _ended(self, exec_id: str, code: int) -> list[Exit]:
        if exec_id not in self.execs:
            return []
        rank, container = self.execs.pop(exec_id)
        self.heard[rank] = time.monotonic()
        if code == LOST:  # the stub was killed: so is its container, though it may still look well
            self.dying.add(container)
        return [Exit(rank, LOST if code == WORKER_KILLED else code)]

    def _expect_shutdown(self) -> None:
        """No node is left: raise EngineLost if that is because the daemon is being stopped, or was restarted."""
        deadline = time.monotonic() + SHUTDOWN
        while time.monotonic() < deadline:
            if self.events and self.events.broken > time.monotonic() - 2 * SHUTDOWN:
                raise EngineLost("the engine was restarted")
            with self.daemon.asking("does not answer"):
                self.client.ping()
            time.sleep(0.2)

    def _project(self, *arguments: str) -> None:
        files = [PROJECT / "docker-compose.yml", *([HOST_NETWORK] if self.network == "host" else [])]
        options = [word for file in files for word in ("--file", str(file))]
        self.daemon.compose(
            "--project-name", self.home, "--profile", "gpu", *options, *arguments, env=self.env, capture=True
        )


def _node_name(container: Container) -> str:
    """`master`, or `trainer-2` for the second trainer in Compose's order."""
    labels = container.attrs["Labels"]
    service = labels["com.docker.compose.service"]
    return "master" if service == "master" else f"{service}-{labels['com.docker.compose.container-number']}"
