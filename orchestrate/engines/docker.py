"""Nodes as containers: Compose brings them up, the Docker SDK finds them by label and runs the job in them."""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import docker
import docker.errors
import requests
from docker.context import ContextAPI
from docker.models.containers import Container
from docker.types import LogConfig

from orchestrate.engines import Exit, JobState
from orchestrate.errors import EngineError, ResourceError
from orchestrate.node.ranks import gpu_ids
from orchestrate.paths import PROJECT, code_folder
from orchestrate.plan import Inventory, Plan, WorkerPlan
from orchestrate.spec import IMAGE, JobSpec

LABEL = "orchestrate.job"
LONGEST = 600  # seconds that Compose may take to bring nodes up or down
RECONCILE = 2.0  # seconds between two looks at the truth, in case the event stream has lost something
ERRORS = (docker.errors.DockerException, requests.RequestException)  # all that the SDK raises
GET_DOCKER = "start Docker (systemctl start docker, or Docker Desktop), or use --engine process"


class DockerEngine:
    """The Docker Engine that the user's `docker` talks to, too."""

    def __init__(self) -> None:
        """Connect; raises EngineError where no engine answers."""
        self.host = os.environ.get("DOCKER_HOST") or _context_host()
        parts = urlsplit(self.host)
        if parts.hostname not in (None, "localhost", "127.0.0.1"):
            raise EngineError(
                f"the engine at {self.host} is another machine, which cannot mount this one's folders",
                "run orchestrate there, or unset DOCKER_HOST (docker context use default)",
            )
        try:
            self.client = docker.DockerClient(base_url=self.host, version="auto", max_pool_size=32)
            self.info: dict[str, Any] = self.client.info()
        except ERRORS as error:
            raise EngineError(f"no Docker Engine answers at {self.host}: {_reason(error)}", GET_DOCKER) from None
        try:
            self._compose("version", capture=True)
        except EngineError as error:
            raise ResourceError(f"Docker Compose v2 is missing: {error}", "install the docker-compose plugin") from None
        self.job_id = ""
        self.env: dict[str, str] = {}
        self.nodes: dict[str, Container] = {}
        self.execs: dict[str, tuple[int, str]] = {}  # exec id: rank and the id of its container
        self.found: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.out_of_memory: set[str] = set()  # ids of containers
        self.looked = 0.0
        self.events: Any = None
        self.closing = False

    # --- before the job

    def inventory(self, spec: JobSpec, run: Path, prepare: bool) -> Inventory:
        """Check the image, list the GPUs; raises ResourceError for what is missing."""
        runtime = "nvidia" in self.info.get("Runtimes", {})
        hopeless = spec.gpus not in ("auto", "none") and not runtime  # then no image is worth building
        present = not hopeless and self._has_image(spec, prepare)
        gpus: tuple[str, ...] = ()
        no_gpus = "the engine has no NVIDIA runtime"
        if spec.gpus != "none" and runtime:
            gpus = self._gpus(spec) if present else ()
            no_gpus = "the engine's NVIDIA runtime finds no GPU" if present else f"no image {spec.image} to look with"
        return Inventory(
            engine="docker",
            about=f"Docker Engine {self.info['ServerVersion']}, image {spec.image}",
            cpus=max(1, self.info["NCPU"]),
            gpus=gpus,
            no_gpus=no_gpus,
            master_addr="master",
            master_port=29500,
            interface="eth0",
            job_dir="/job",
        )

    def _has_image(self, spec: JobSpec, prepare: bool) -> bool:
        with contextlib.suppress(docker.errors.ImageNotFound):
            self.client.images.get(spec.image)
            return True
        if not prepare:
            return False
        try:
            if spec.image == IMAGE:
                self._compose("--profile", "gpu", "build", "master", env={"NODE_IMAGE": spec.image})
            else:
                self.client.images.pull(spec.image)
        except EngineError as error:
            hint = "its base image is BASE_IMAGE, and CA_BUNDLE names a CA bundle; see README, The image"
            raise ResourceError(f"the image {spec.image} could not be built: {error}", hint) from None
        except ERRORS as error:
            hint = "check the name, `docker login`, or build it: docker build -t NAME ."
            raise ResourceError(f"no image {spec.image} here, nor to pull: {_reason(error)}", hint) from None
        return True

    def _gpus(self, spec: JobSpec) -> tuple[str, ...]:
        """Ask nvidia-smi in a container that sees all GPUs; none where that cannot start, for lack of a driver say."""
        container = None
        try:
            container = self.client.containers.create(
                spec.image,
                ["-L"],
                entrypoint="nvidia-smi",
                runtime="nvidia",
                environment={"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "utility"},
                network_mode="none",
                log_config=LogConfig(type=LogConfig.types.JSON),
            )
            container.start()
            container.wait(timeout=60)
            return tuple(gpu_ids(container.logs(stderr=False).decode(errors="replace")))
        except ERRORS:
            return ()
        finally:
            if container is not None:
                container.remove(force=True)

    # --- the job

    def up(self, spec: JobSpec, plan: Plan, run: Path) -> None:
        """Have Compose bring up the nodes, and start listening to what happens to them."""
        code = code_folder(spec.command)
        for path in (run, code):
            if ":" in str(path):
                raise EngineError(f"Compose cannot mount {path}, for the colon in it", "take a folder without a colon")
        self.job_id = plan.job_id
        self.env = {
            "JOB_ID": plan.job_id,
            "NODE_MODE": "wait",
            "NODE_IMAGE": spec.image,
            "NODE_CODE": str(code),
            "NODE_JOB_DIR": str(run),
            "NODE_USER": self._user(run),
            "NODE_RUNTIME": "nvidia" if plan.gpus else self.info["DefaultRuntime"],
            "NODE_GPUS": ",".join(plan.gpus) or "void",
            "NODE_SHM": spec.shm_size,
            "NODE_MEMORY": spec.memory or "0",
            "NODE_CPUS": str(spec.cpus or 0),
            "NODE_GRACE": str(spec.grace),
        }
        threading.Thread(target=self._listen, args=(int(time.time()),), daemon=True).start()
        scale = f"trainer={len(plan.nodes) - 1}"
        self._project("up", "--detach", "--no-build", "--pull", "never", "--scale", scale, "master", "trainer")
        self.nodes = {_node_name(container): container for container in self._containers(f"{LABEL}={self.job_id}")}
        missing = [name for name in plan.nodes if name not in self.nodes]
        if missing:
            raise EngineError(f"Compose did not bring up {', '.join(missing)}", "see docker compose ls")

    def start(self, workers: tuple[WorkerPlan, ...], command: tuple[str, ...]) -> None:
        """Start a stub in each worker's node, which has the node start the worker and ends with its code."""

        def start(worker: WorkerPlan) -> None:
            api, node = self.client.api, self.nodes[worker.node]
            stub = ["python", "/opt/orchestrate/node", "worker", *command]
            try:
                created: str = api.exec_create(node.id, stub, environment=worker.env, stdout=False, stderr=False)["Id"]
                self.execs[created] = worker.rank, str(node.id)
                api.exec_start(created, detach=True)
            except ERRORS as error:
                raise EngineError(f"rank {worker.rank} did not start on {worker.node}: {_reason(error)}") from None

        start(workers[0])
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(start, workers[1:]))

    def wait(self, timeout: float) -> list[Exit]:
        """The workers whose stub has ended, by the event stream or, when that is silent, by a look at the truth."""
        exits: list[Exit] = []
        with contextlib.suppress(queue.Empty):
            exits += self._exits(self.found.get(timeout=timeout))
            while True:
                exits += self._exits(self.found.get_nowait())
        if self.execs and time.monotonic() - self.looked > RECONCILE:
            self.looked = time.monotonic()
            exits += self._reconcile()
        return exits

    def explain(self, end: Exit, node: str) -> str:
        """Tell whether the worker's container has ended, or the kernel killed in it for lack of memory."""
        self.wait(timeout=0.1)  # what happened around that end
        container = self.nodes[node]
        try:
            container.reload()
        except ERRORS:
            return "node lost"
        if container.status != "running":
            return "node lost"
        return "oom" if end.code == 137 and container.id in self.out_of_memory else ""

    def stop(self, kill: bool) -> None:
        """Ask all workers to stop, or kill them."""
        self._each(lambda node: node.kill("SIGUSR2" if kill else "SIGUSR1"))

    def down(self, grace: float) -> None:
        """Remove nodes and network."""
        self.closing = True
        if self.events is not None:
            self.events.close()
        if self.job_id:
            self._project("down", "--volumes", "--remove-orphans", "--timeout", str(int(grace)))

    # --- from another shell

    def jobs(self) -> list[JobState]:
        """The jobs that have containers, by their labels."""
        containers = self._containers(LABEL)
        jobs: dict[str, list[Container]] = {}
        for container in containers:
            jobs.setdefault(container.labels[LABEL], []).append(container)
        runs = {job: Path(nodes[0].labels.get("orchestrate.run", "")) for job, nodes in jobs.items()}
        return [JobState(job, "docker", len(jobs[job]), runs[job]) for job in sorted(jobs) if job]

    def remove(self, job_id: str, grace: float) -> None:
        """Stop and remove containers and networks that carry the job's label, and nothing else."""
        self.nodes = {str(container.id): container for container in self._containers(f"{LABEL}={job_id}")}
        self._each(lambda node: node.stop(timeout=int(grace)))
        self._each(lambda node: node.remove(force=True, v=True))
        try:
            for network in self.client.networks.list(filters={"label": f"{LABEL}={job_id}"}):
                network.remove()
        except ERRORS as error:
            raise EngineError(f"a network of {job_id} stays: {_reason(error)}", "docker network ls") from None

    # --- details

    def _user(self, run: Path) -> str:
        """Whoever owns the run directory; a rootless engine's root is that very person."""
        if any("rootless" in option for option in self.info.get("SecurityOptions") or []):
            return "0:0"
        owner = run.stat()
        return f"{owner.st_uid}:{owner.st_gid}"

    def _containers(self, label: str) -> list[Container]:
        try:
            return self.client.containers.list(all=True, filters={"label": label}, ignore_removed=True)
        except ERRORS as error:
            raise EngineError(f"the engine does not list its containers: {_reason(error)}", GET_DOCKER) from None

    def _each(self, action: Any) -> None:
        """Do something to all nodes at once; one that is gone, or not running, needs it no more."""

        def act(node: Container) -> None:
            try:
                action(node)
            except docker.errors.APIError as error:
                if error.status_code not in (404, 409):
                    raise EngineError(f"{node.name}: {_reason(error)}") from None
            except ERRORS as error:
                raise EngineError(f"the engine does not answer: {_reason(error)}", GET_DOCKER) from None

        with ThreadPoolExecutor(16) as pool:
            list(pool.map(act, self.nodes.values()))

    def _listen(self, since: int) -> None:
        """Put the job's events on the queue until the end; a broken stream is taken up where it broke."""
        filters = {"label": f"{LABEL}={self.job_id}", "type": "container"}
        while not self.closing:
            with contextlib.suppress(*ERRORS):
                self.events = self.client.api.events(since=since, filters=filters, decode=True)
                for event in self.events:  # which ends without a word when the connection breaks
                    since = event["time"]
                    self.found.put(event)
            if not self.closing:
                time.sleep(0.5)

    def _exits(self, event: dict[str, Any]) -> Iterator[Exit]:
        attributes = event["Actor"]["Attributes"]
        if event["Action"] == "oom":
            self.out_of_memory.add(event["Actor"]["ID"])
        elif event["Action"] == "exec_die":
            yield from self._ended(attributes["execID"], int(attributes["exitCode"]))
        elif event["Action"] == "die":
            for exec_id in [key for key, (_, node) in self.execs.items() if node == event["Actor"]["ID"]]:
                yield from self._ended(exec_id, int(attributes["exitCode"]) or 137)

    def _reconcile(self) -> Iterator[Exit]:
        for exec_id in list(self.execs):
            try:
                state = self.client.api.exec_inspect(exec_id)
                if not state["Running"] and state["ExitCode"] is not None:
                    yield from self._ended(exec_id, state["ExitCode"])
            except docker.errors.NotFound:  # the container is gone, and its execs with it
                yield from self._ended(exec_id, 137)
            except ERRORS as error:
                raise EngineError(f"the engine does not answer any more: {_reason(error)}", GET_DOCKER) from None

    def _ended(self, exec_id: str, code: int) -> Iterator[Exit]:
        if exec_id in self.execs:
            yield Exit(self.execs.pop(exec_id)[0], code)

    def _project(self, *arguments: str) -> None:
        self._compose("--project-name", self.job_id, "--profile", "gpu", *arguments, env=self.env, capture=True)

    def _compose(self, *arguments: str, env: dict[str, str] | None = None, capture: bool = False) -> None:
        """Run Compose; raises EngineError with the last lines that it printed."""
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(("COMPOSE_", "NODE_"))}
        try:
            done = subprocess.run(
                ["docker", "--host", self.host, "compose", "--project-directory", str(PROJECT), *arguments],
                env=inherited | (env or {}),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if capture else 2,
                stderr=subprocess.STDOUT if capture else None,
                start_new_session=capture,  # Ctrl-C is for us; we take down what Compose is bringing up
                timeout=LONGEST if capture else None,
                text=True,
            )
        except subprocess.TimeoutExpired:
            raise EngineError(f"docker compose did not end within {LONGEST} s") from None
        except FileNotFoundError:
            raise ResourceError("no `docker` command on PATH", "install it, with its Compose plugin") from None
        if done.returncode:
            lines = (done.stdout or "see above").strip().splitlines()
            raise EngineError(f"docker compose {arguments[-1] if not capture else ''}".strip() + f": {lines[-1]}")


def _context_host() -> str:
    """Where the `docker` command would look for the engine."""
    try:
        return str(ContextAPI.get_current_context().Host or "unix:///var/run/docker.sock")
    except (docker.errors.DockerException, AttributeError):
        return "unix:///var/run/docker.sock"


def _node_name(container: Container) -> str:
    """`master`, or `trainer-2` for the second trainer in Compose's order."""
    service = container.labels["com.docker.compose.service"]
    return "master" if service == "master" else f"{service}-{container.labels['com.docker.compose.container-number']}"


def _reason(error: Exception) -> str:
    """The root of a chain of errors, in one line."""
    text = getattr(error, "explanation", None) or str(error)
    for known in ("Permission denied", "No such file or directory", "Connection refused", "timed out"):
        if known in str(text):
            return known.lower()
    return " ".join(str(text).split())[:300]
