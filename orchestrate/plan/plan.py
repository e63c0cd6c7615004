"""plan(spec, inventory) -> Plan: the rank, GPU and environment of every worker. Pure; `str(plan)` is for display."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from orchestrate.dataclass import dataclass, field, replace
from orchestrate.errors import ResourceError
from orchestrate.files import typed
from orchestrate.files.paths import NAME, STDIN, WORK
from orchestrate.host.cores import shares_near
from orchestrate.node.messages import checks
from orchestrate.node.ranks import assign
from orchestrate.plan import environment, sagemaker
from orchestrate.plan.limits import Limits, limits
from orchestrate.spec.folders import data_variables
from orchestrate.spec.redact import Mask, redacted
from orchestrate.spec.sizes import UNLIMITED, format_bytes
from orchestrate.spec.spec import APP, JobSpec
from orchestrate.spec.values import MAX_TRAINERS, MAX_WORKERS

CROWD = 32  # workers per core
NODE = re.compile(r"master|trainer-[1-9][0-9]{0,5}")


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """Resources that an engine offers to a job."""

    engine: str  # docker, process, swarm or slurm
    about: str  # the engine and its version, for display
    cores: tuple[int, ...]  # numbers of the logical cores that may be used; neighbors share caches
    gpus: tuple[str, ...]  # ids of the GPUs that may be used
    no_gpus: str  # why `gpus` is empty, if it is
    gpu_note: str = ""  # about GPUs that other programs use
    gpu_cores: tuple[tuple[int, ...], ...] = ()  # the cores near each GPU, if workers are pinned
    memory: int = 0  # bytes of the (smallest) machine; 0 if unknown, or if it cannot be limited
    hosts: int = 1  # number of machines that take nodes


@dataclass(frozen=True, kw_only=True)
class Placement:
    """How a job runs on its engine: its network and folders, and settings of its nodes."""

    network: str  # bridge (a network for this job) or host; empty for local processes
    master_addr: str  # for all nodes; empty if nodes have names in DNS
    interface: str  # the one network interface for gloo and NCCL
    job_dir: str  # the job folder, as a worker sees it
    code: str = ""  # the code folder on this machine
    chdir: str = ""  # folder in it in which workers start
    revision: str = ""  # its Git commit, with `-dirty` if files are changed; empty if it is in no repository
    original: str = ""  # path of the code folder in nodes, if workers run in a copy of it, in the job folder
    sent: bool = False  # whether each node is sent its own copy of the code, to its job folder
    data: dict[str, str] = field(default_factory=dict)  # paths in nodes of the job's folders with data, by name
    image: str = ""  # image of nodes in containers
    python: str = "python"  # interpreter of nodes
    preload: tuple[str, ...] = ()  # modules that nodes import before workers start
    keep: float = 0.0  # seconds for which nodes stay up without a job; 0 if that is not limited
    cluster: str = ""  # the cluster whose nodes are used; empty if the job starts its own nodes
    sharing: int = 0  # number of nodes of that cluster, which share the memory of the machines

    @property
    def copies(self) -> bool:
        """Whether workers run in a copy of the code folder that this machine makes."""
        return bool(self.original)

    @property
    def has_work(self) -> bool:
        """Whether the job folder contains the working directory of workers."""
        return self.copies or self.sent

    @property
    def start(self) -> Path:
        """The folder on this machine in which paths of the command start."""
        return Path(self.code, self.chdir)

    def cwd(self, code: str) -> str:
        """Return the working directory of workers; `code` is the path of the code folder in nodes."""
        return str(Path(f"{self.job_dir}/{WORK}" if self.has_work else code, self.chdir))

    @property
    def packages(self) -> tuple[str, ...]:
        """Top-level packages of the modules that nodes import."""
        return tuple(dict.fromkeys(name.partition(".")[0] for name in self.preload))


@dataclass(frozen=True, kw_only=True)
class WorkerPlan:
    """A worker: one process with a `RANK`."""

    rank: int
    local_rank: int  # among the workers of its node
    node: str
    gpu: str  # its own GPU, or empty
    cores: tuple[int, ...]  # cores that it is pinned to; empty if not pinned
    env: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The settings of every node and worker."""

    job_id: str
    generation: int
    command: tuple[str, ...]
    inventory: Inventory
    placement: Placement
    nodes: tuple[str, ...]  # names; the first is the master
    nproc_per_node: int
    gpus: tuple[str, ...]  # of all nodes, including missing ones
    master_addr: str  # where rank 0 listens
    port: int
    reason: str  # why the workers run on CPU, if they do
    limits: Limits  # of each node
    workers: tuple[WorkerPlan, ...]
    secrets: tuple[str, ...] = ()  # variables that the job file lists as secrets

    @property
    def engine(self) -> str:
        """The name of the engine."""
        return self.inventory.engine

    @property
    def contained(self) -> bool:
        """Whether nodes are containers."""
        return self.engine in ("docker", "swarm")

    @property
    def project(self) -> str:
        """Name of the containers and network of its nodes: the cluster's name, or the job id."""
        return self.placement.cluster or self.job_id

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return len(self.workers)

    @property
    def is_crowded(self) -> bool:
        """Whether it has so many workers per core that this is likely a mistake."""
        return self.world_size > CROWD * max(1, len(self.inventory.cores))

    @property
    def _is_open(self) -> bool:
        """Whether torch's store can be reached from other machines: rank 0 would listen on all interfaces."""
        hosted = self.workers[0].env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return self.placement.network in ("", "host") and not (hosted and self.master_addr == "127.0.0.1")

    def to_json(self, hide: Mask) -> str:
        """The plan as JSON, for `plan.json`, without the values of secrets, which `hide` also hides in the command."""
        values = typed.encode(self) | {"command": list(map(hide, self.command))}
        for worker in values["workers"]:
            worker["env"] = redacted(worker["env"], self.secrets)
        return json.dumps(values, indent=2)

    def __str__(self) -> str:
        """The plan for display: a summary, and a line per worker."""
        note = f" ({self.inventory.gpu_note})" if self.inventory.gpu_note else ""
        shared = pluralize(len(self.gpus), "shared GPU") if len(self.gpus) < self.world_size else ""
        on_gpus = f"on {shared}{note}" if shared else f"NCCL on GPU{note}"
        backend = on_gpus if self.gpus else f"gloo on CPU ({self.reason})"
        # The job may set it, for example to a list for nested parallel regions.
        threads, width = self.workers[0].env["OMP_NUM_THREADS"], max(map(len, self.nodes))
        lines = [
            f"job {self.job_id}: {pluralize(len(self.nodes), 'node')} × {pluralize(self.nproc_per_node, 'worker')}, "
            + backend
            + (f", on {self.placement.cluster}" if self.placement.cluster else ""),
            f"{self.inventory.about}, master at {self.master_addr}:{self.port}"
            + (" (open on all interfaces), " if self._is_open else ", ")
            + (pluralize(int(threads), "thread") if threads.isdecimal() else f"{threads} threads")
            + " per worker"
            + (f", {format_bytes(self.limits.memory)} of memory per node" if self.limits.memory else "")
            + (", warm" if self.placement.preload else "")
            + (", on the host network" if self.placement.network == "host" else ""),
        ]
        for worker in self.workers:
            pinned = f", {_cores(worker.cores)}" if worker.cores else ""
            where = f"rank {worker.rank:<3} {worker.node:<{width}}  local rank {worker.local_rank}"
            lines.append(f"  {where}  {worker.gpu or 'cpu'}{pinned}")
        return "\n".join(lines)


def names(spec: JobSpec, spares: bool = False) -> tuple[str, ...]:
    """Names of the nodes that a job requests; `spares` includes its standby nodes."""
    return ("master", *(f"trainer-{i}" for i in range(1, spec.trainers + 1 + spec.spares * spares)))


def in_order(nodes: Iterable[str]) -> tuple[str, ...]:
    """Sort names of nodes: the master first, then the trainers by number."""
    return tuple(sorted(nodes, key=lambda name: (name != "master", int(name.partition("-")[2] or 0))))


def plan(
    spec: JobSpec,
    inventory: Inventory,
    placement: Placement,
    job_id: str,
    port: int,
    generation: int = 0,
    nodes: tuple[str, ...] = (),
) -> Plan:
    """Assign a rank, node and GPU to every worker, on all nodes of `spec` or on the given `nodes`.

    `port` is where rank 0 listens. Raises ResourceError if the engine has too few GPUs or cores.
    """
    wanted_nodes, nodes = len(names(spec)), nodes or names(spec)
    offered = _gpus(spec, inventory)
    nproc = spec.nproc_per_node or min(_max_workers_per_node(offered), max(1, len(offered) // wanted_nodes))
    world_size = len(nodes) * nproc
    gpus = _assigned_gpus(spec, inventory, offered, nproc, world_size)
    shared = bool(gpus) and len(offered) < world_size
    cores = _assigned_cores(spec, inventory, gpus, world_size)
    project = placement.cluster or job_id
    address = placement.master_addr or (nodes[0] if nodes[0] == "master" else f"{project}-{nodes[0]}")
    cpus, cwd = _usable_cores(spec, inventory, len(nodes)), str(Path(placement.cwd(placement.code), spec.chdir))
    machine = {"host": "", "cpus": cpus, "gpus": list(gpus)}
    envs = assign([machine for _ in nodes], nproc, address, port, job_id, placement.interface)
    of_job = _env_of_job(spec, placement, job_id, generation)
    stdin = {"WORKER_STDIN": f"{placement.job_dir}/{STDIN}"} if spec.stdin else {}
    workers = [
        WorkerPlan(
            rank=rank,
            local_rank=rank % nproc,
            node=nodes[rank // nproc],
            gpu=gpus[rank] if gpus else "",
            cores=cores[rank],
            env=env
            | of_job
            | (stdin if not rank else {})
            | environment.of_worker(spec, cores[rank], gpus[rank] if gpus else "", shared)
            | (sagemaker.variables(spec, placement.data, cwd, nodes, env | of_job, cpus) if spec.sagemaker else {})
            | spec.env,
        )
        for rank, env in enumerate(envs)
    ]
    return Plan(
        job_id=job_id,
        generation=generation,
        command=spec.command_line,
        inventory=inventory,
        placement=replace(placement, chdir=spec.chdir),
        nodes=nodes,
        nproc_per_node=nproc,
        gpus=offered[: wanted_nodes * nproc],
        master_addr=address,
        port=port,
        reason="" if gpus else "--gpus none" if spec.gpus == "none" else inventory.no_gpus,
        limits=_limits(spec, inventory, placement.sharing),
        workers=tuple(workers),
        secrets=tuple(spec.secrets),
    )


def _env_of_job(spec: JobSpec, placement: Placement, job_id: str, generation: int) -> dict[str, str]:
    """The variables that are the same for all workers of a generation."""
    torchs = {
        "TORCHELASTIC_RESTART_COUNT": str(generation),
        "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
        "TORCHELASTIC_USE_AGENT_STORE": str(may_use_torch(spec, placement.preload)),
    }
    return torchs | {"JOB_ID": job_id, "JOB_DIR": placement.job_dir} | data_variables(placement.data)


def may_use_torch(spec: JobSpec, modules: tuple[str, ...]) -> bool:
    """Whether workers may use torch: it is in the preloaded `modules`, or the imports of the script were not read."""
    return "torch" in modules or not spec.warm or not spec.command[0].endswith(".py") or sys.platform != "linux"


def _max_workers_per_node(gpus: tuple[str, ...]) -> int:
    """Maximum number of workers on a node: CUDA uses only one MIG instance per process."""
    return 1 if any(gpu.startswith("MIG-") for gpu in gpus) else MAX_WORKERS


def _assigned_gpus(
    spec: JobSpec, inventory: Inventory, gpus: tuple[str, ...], nproc: int, world_size: int
) -> tuple[str, ...]:
    """The GPU of each worker, by rank; empty on CPU. Raises ResourceError if there are too few GPUs."""
    if gpus and nproc > _max_workers_per_node(gpus):
        raise ResourceError(
            f"{nproc} workers per node, but a node can use only one MIG instance", "use --nproc-per-node 1"
        )
    shares = spec.share_gpus or (spec.gpus == "auto" and spec.command == APP)  # the app runs on any machine with a GPU
    shares = shares and inventory.engine not in ("swarm", "slurm")
    if shares and nproc <= len(gpus):  # each worker of a node still has its own
        return tuple(gpus[rank % len(gpus)] for rank in range(world_size))
    if gpus and len(gpus) < world_size:
        note = f" ({inventory.gpu_note})" if inventory.gpu_note else ""
        but, first = f"only {_number_is(len(gpus))} available{note}", "wait for them (--queue), " if note else ""
        if isinstance(spec.gpus, int):
            but, first = f"--gpus is {spec.gpus}", f"set --gpus {world_size}, "
        fewer = len(gpus) // nproc
        ways = [f"--nodes {fewer}"] * (fewer > 0) + ["--nproc-per-node 1"] * (nproc > 1)
        raise ResourceError(
            f"{world_size} workers need {world_size} GPUs, but {but}",
            f"{'' if spec.queue else first}use fewer nodes or workers ({', '.join(ways)}), "
            + ("let nodes share GPUs (--set share_gpus=true), " * (fewer > 0 and inventory.engine != "slurm"))
            + "or train with gloo on CPU (--gpus none)",
        )
    return gpus


def _assigned_cores(
    spec: JobSpec, inventory: Inventory, gpus: tuple[str, ...], world_size: int
) -> Sequence[tuple[int, ...]]:
    """The cores that each worker is pinned to, near its GPU; empty if not pinned. Raises ResourceError if too few."""
    if not spec.pin:
        return [()] * world_size
    if len(inventory.cores) < world_size:
        raise ResourceError(
            f"pin: {world_size} workers need {world_size} cores, but only {_number_is(len(inventory.cores))} available",
            "use fewer workers, or remove pin",
        )
    close = dict(zip(inventory.gpus, inventory.gpu_cores))
    return shares_near(inventory.cores, [close.get(gpu, ()) for gpu in gpus[:world_size]] or [()] * world_size)


def _usable_cores(spec: JobSpec, inventory: Inventory, nodes: int) -> int:
    """Number of cores for computation: with a limit of `cpus`, more threads would only wait for each other."""
    if spec.cpus and inventory.engine != "process":
        return min(len(inventory.cores), math.floor(spec.cpus * nodes))
    return len(inventory.cores)


def read_plan(text: str, env: Mapping[str, str]) -> Plan:
    """Parse the output of `to_json`; raises ValueError, TypeError or KeyError for anything else.

    `env` is the job's own environment with the values of secrets, which the text does not contain; secrets in the
    command remain `***`.
    """
    checks.limit_values(text.encode(errors="replace"), 5 * checks.MAX_VALUES)  # a worker has some sixty
    values = json.loads(text)
    for worker in values["workers"]:
        worker["env"] |= env
    read = typed.decode(values, Plan)
    _check(read)
    return read


def _check(plan: Plan) -> None:
    """Raise ValueError for invalid names, sizes, ranks, or text that cannot be passed to a process."""
    for name in (plan.job_id, plan.project):
        if not NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not the name of a job")
    if odd := [node for node in plan.nodes if not NODE.fullmatch(node)]:
        raise ValueError(f"{odd[0]!r} is not the name of a node")
    if not 0 < len(plan.nodes) <= 1 + MAX_TRAINERS or not 0 < plan.nproc_per_node <= MAX_WORKERS:
        raise ValueError(
            f"it has {len(plan.nodes)} nodes with {plan.nproc_per_node} workers each, "
            f"but a job has 1 to {1 + MAX_TRAINERS} nodes with 1 to {MAX_WORKERS} workers"
        )
    places = enumerate(node for node in plan.nodes for _ in range(plan.nproc_per_node))
    if [(worker.rank, worker.node) for worker in plan.workers] != list(places):
        raise ValueError("its ranks are not numbered from 0, or not on its nodes")
    if any(map(checks.path, plan.command)):
        raise ValueError("its command has text that cannot be passed to a process")
    for worker in plan.workers:
        for name, value in worker.env.items():
            if not name or "=" in name or checks.path(name) or checks.path(value):
                raise ValueError(f"the environment variable {name[:60]!a} cannot be passed to rank {worker.rank}")


def _limits(spec: JobSpec, inventory: Inventory, sharing: int) -> Limits:
    """Limits of a node, the same in every generation, even with fewer nodes."""
    together = sharing or len(names(spec, spares=True))
    asked = UNLIMITED if inventory.engine == "process" else spec.memory
    return limits(asked, inventory.memory, math.ceil(together / inventory.hosts))


def _gpus(spec: JobSpec, inventory: Inventory) -> tuple[str, ...]:
    if spec.gpus == "none":
        return ()
    if spec.gpus != "auto" and not inventory.gpus:
        raise ResourceError(
            f"--gpus {spec.gpus}: {inventory.no_gpus}",
            "python -m orchestrate doctor lists GPUs and what is missing; use --gpus none to train with gloo on CPU",
        )
    if isinstance(spec.gpus, int) and spec.gpus > len(inventory.gpus):
        raise ResourceError(
            f"--gpus {spec.gpus}: only {_number_is(len(inventory.gpus))} available: {', '.join(inventory.gpus)}",
            f"use --gpus {len(inventory.gpus)}, or --gpus all",
        )
    return inventory.gpus[: spec.gpus] if isinstance(spec.gpus, int) else inventory.gpus


def _cores(cores: tuple[int, ...]) -> str:
    return f"core{'s' if len(cores) > 1 else ''} {','.join(map(str, cores))}"


def pluralize(number: int, noun: str) -> str:
    """`1 node`, `2 nodes`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _number_is(number: int) -> str:
    return "1 is" if number == 1 else f"{number} are"
