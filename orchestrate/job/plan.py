"""plan(spec, inventory) -> Plan: who is which rank, on which GPU, with which environment. Pure; it prints as text."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from orchestrate.errors import ResourceError
from orchestrate.files import typed
from orchestrate.files.paths import NAME
from orchestrate.job.cores import shares_near
from orchestrate.job.limits import UNLIMITED, Limits, in_words, limits
from orchestrate.job.redact import Mask, redacted
from orchestrate.job.spec import APP, JobSpec
from orchestrate.job.values import MAX_TRAINERS, MAX_WORKERS
from orchestrate.node import checks
from orchestrate.node.ranks import assign

NODE = re.compile(r"master|trainer-[1-9][0-9]{0,5}")


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """What an engine has for a job."""

    engine: str  # docker, process or swarm
    about: str  # the engine in words, with its version
    cores: tuple[int, ...]  # numbers of the logical cores that may be used; neighbours share caches
    gpus: tuple[str, ...]  # ids of the GPUs that may be used
    no_gpus: str  # why there are none, where there are none
    gpu_note: str = ""  # what to know about GPUs that other programs use
    gpu_cores: tuple[tuple[int, ...], ...] = ()  # the cores near each GPU, where workers are to be kept to them
    memory: int = 0  # bytes that the (smallest) machine has; 0 where that is not known or cannot be limited
    hosts: int = 1  # the machines that take nodes


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where a job goes on its engine: its network and folders, and how its nodes run."""

    network: str  # bridge, where the job has a network of its own, or host; empty for local processes
    master_addr: str  # of every node; empty where a node has a name of its own in DNS
    interface: str  # the one network interface for gloo and NCCL
    job_dir: str  # the run directory, as a worker sees it
    code: str = ""  # the folder of this machine in which the command runs
    python: str = "python"  # with which nodes in containers run
    preload: tuple[str, ...] = ()  # the modules that nodes import before there is a worker
    cluster: str = ""  # the cluster whose nodes are used, and stay; empty where the job has nodes of its own
    sharing: int = 0  # the nodes of that cluster, which share the memory of the machines

    @property
    def packages(self) -> tuple[str, ...]:
        """The top-level packages of the modules that nodes import."""
        return tuple(dict.fromkeys(name.partition(".")[0] for name in self.preload))


@dataclass(frozen=True, kw_only=True)
class WorkerPlan:
    """One process with a `RANK`."""

    rank: int
    local_rank: int  # among those of its node
    node: str
    gpu: str  # its own GPU, or empty
    cores: tuple[int, ...]  # which it keeps to; empty for any
    env: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What every node and worker gets, as plain data."""

    job_id: str
    generation: int
    command: tuple[str, ...]
    inventory: Inventory
    placement: Placement
    nodes: tuple[str, ...]  # names; the first is the master
    nproc_per_node: int
    gpus: tuple[str, ...]  # of all its nodes, also of those that are missing
    master_addr: str  # where rank 0 listens
    port: int
    reason: str  # why the workers run on CPU, where they do
    limits: Limits  # of each node
    workers: tuple[WorkerPlan, ...]
    secrets: tuple[str, ...] = ()  # variables that the job file calls secret

    @property
    def engine(self) -> str:
        """The name of the engine."""
        return self.inventory.engine

    @property
    def project(self) -> str:
        """The name under which its nodes exist: the cluster's, or its own id."""
        return self.placement.cluster or self.job_id

    @property
    def world_size(self) -> int:
        """How many workers there are."""
        return len(self.workers)

    def to_json(self) -> str:
        """The plan as JSON, for `plan.json`, without the values of secrets."""
        hide = Mask(self.workers[0].env, self.secrets)
        values = typed.encode(self) | {"command": list(map(hide, self.command))}
        for worker in values["workers"]:
            worker["env"] = redacted(worker["env"], self.secrets)
        return json.dumps(values, indent=2)

    def __str__(self) -> str:
        """The plan for a person: a line per worker."""
        note = f" ({self.inventory.gpu_note})" if self.inventory.gpu_note else ""
        shared = counted(len(self.gpus), "shared GPU") if len(self.gpus) < self.world_size else ""
        on_gpus = f"on {shared}{note}" if shared else f"NCCL on GPU{note}"
        backend = on_gpus if self.gpus else f"gloo on CPU ({self.reason})"
        threads = self.workers[0].env[
            "OMP_NUM_THREADS"
        ]  # a script's author may have set it, to a list for nested regions, say
        width = max(map(len, self.nodes))
        lines = [
            f"job {self.job_id}: {counted(len(self.nodes), 'node')} × {counted(self.nproc_per_node, 'worker')}, "
            + backend
            + (f", on {self.placement.cluster}" if self.placement.cluster else ""),
            f"{self.inventory.about}, master at {self.master_addr}:{self.port}"
            + (" (open on all interfaces), " if self.placement.network in ("", "host") else ", ")
            + (counted(int(threads), "thread") if threads.isdecimal() else f"{threads} threads")
            + " per worker"
            + (f", {in_words(self.limits.memory)} of memory per node" if self.limits.memory else "")
            + (", warm" if self.placement.preload else "")
            + (", on the network of this machine" if self.placement.network == "host" else ""),
        ]
        for worker in self.workers:
            kept = f", {_cores(worker.cores)}" if worker.cores else ""
            where = f"rank {worker.rank:<3} {worker.node:<{width}}  local rank {worker.local_rank}"
            lines.append(f"  {where}  {worker.gpu or 'cpu'}{kept}")
        return "\n".join(lines)


def names(spec: JobSpec, spares: bool = False) -> tuple[str, ...]:
    """The nodes that a job wants; with its spare ones, where they are asked for."""
    return ("master", *(f"trainer-{i}" for i in range(1, spec.trainers + 1 + spec.spares * spares)))


def in_order(nodes: Iterable[str]) -> tuple[str, ...]:
    """The master first, then the trainers by number."""
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
    """Give every worker its rank, node and GPU, on all nodes that `spec` wants or on the `nodes` that there are.

    `port` is where rank 0 listens. Raises ResourceError where the engine has too few GPUs.
    """
    wanted_nodes = len(names(spec))
    nodes = nodes or names(spec)
    offered = _gpus(spec, inventory)
    nproc = spec.nproc_per_node or min(_most_on_a_node(offered), max(1, len(offered) // wanted_nodes))
    world_size = len(nodes) * nproc
    gpus = _given_out(spec, inventory, offered, nproc, world_size)
    shared = bool(gpus) and len(offered) < world_size
    kept = _cores_of_workers(spec, inventory, gpus, world_size)
    project = placement.cluster or job_id
    address = placement.master_addr or (nodes[0] if nodes[0] == "master" else f"{project}-{nodes[0]}")
    machine = {"host": "", "cpus": _usable_cores(spec, inventory, len(nodes)), "gpus": list(gpus)}
    envs = assign([machine for _ in nodes], nproc, address, port, job_id, placement.interface)
    restarts = {"TORCHELASTIC_RESTART_COUNT": str(generation), "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts)}
    files = {"JOB_ID": job_id, "JOB_DIR": placement.job_dir}
    workers = [
        WorkerPlan(
            rank=rank,
            local_rank=rank % nproc,
            node=nodes[rank // nproc],
            gpu=gpus[rank] if gpus else "",
            cores=kept[rank],
            env=env | restarts | files | _own(spec, kept[rank], shared) | spec.env,
        )
        for rank, env in enumerate(envs)
    ]
    return Plan(
        job_id=job_id,
        generation=generation,
        command=spec.command,
        inventory=inventory,
        placement=placement,
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


def _most_on_a_node(gpus: tuple[str, ...]) -> int:
    """How many workers a node can have: CUDA uses one MIG instance in a process."""
    return 1 if any(gpu.startswith("MIG-") for gpu in gpus) else MAX_WORKERS


def _given_out(
    spec: JobSpec, inventory: Inventory, gpus: tuple[str, ...], nproc: int, world_size: int
) -> tuple[str, ...]:
    """The GPU of each worker, by rank; none where the job runs on CPU. Raises ResourceError if there are too few."""
    if gpus and nproc > _most_on_a_node(gpus):
        raise ResourceError(f"{nproc} workers on a node, and one can use a single MIG instance", "--nproc-per-node 1")
    shares = spec.share_gpus or (spec.gpus == "auto" and spec.command == APP)  # any machine with a GPU runs the app
    if shares and nproc <= len(gpus) and inventory.engine != "swarm":  # a node's workers still have one each
        return tuple(gpus[rank % len(gpus)] for rank in range(world_size))
    if gpus and len(gpus) < world_size:
        fewer = len(gpus) // nproc - 1
        ways = [f"--trainers {fewer}"] if fewer >= 0 else []
        raise ResourceError(
            f"{world_size} workers need {world_size} GPUs, and there {_are(len(gpus))}"
            + (f" ({inventory.gpu_note})" if inventory.gpu_note else ""),
            f"take fewer nodes or workers ({', '.join([*ways, '--nproc-per-node 1'] if nproc > 1 else ways)}), "
            + ("let nodes share GPUs (--set share_gpus=true), " if nproc <= len(gpus) else "")
            + "or train with gloo on CPU (--gpus none)",
        )
    return gpus


def _cores_of_workers(
    spec: JobSpec, inventory: Inventory, gpus: tuple[str, ...], world_size: int
) -> Sequence[tuple[int, ...]]:
    """The cores that each worker keeps to, near its GPU; empty for any. Raises ResourceError if there are too few."""
    if not spec.pin:
        return [()] * world_size
    if len(inventory.cores) < world_size:
        raise ResourceError(
            f"pin: {world_size} workers need {world_size} cores, and there {_are(len(inventory.cores))}",
            "take fewer workers, or leave out pin",
        )
    close = dict(zip(inventory.gpus, inventory.gpu_cores))
    return shares_near(inventory.cores, [close.get(gpu, ()) for gpu in gpus[:world_size]] or [()] * world_size)


def _usable_cores(spec: JobSpec, inventory: Inventory, nodes: int) -> int:
    """The cores that workers compute on: with a limit of `cpus`, more threads would only wait for each other."""
    if spec.cpus and inventory.engine != "process":
        return min(len(inventory.cores), math.floor(spec.cpus * nodes))
    return len(inventory.cores)


def read_plan(text: str, env: Mapping[str, str]) -> Plan:
    """The plan that `to_json` wrote; raises ValueError, TypeError or KeyError for anything else.

    `env` is the job's own environment, for the values of secrets, which are not in the text; those in the
    command remain `***`.
    """
    values = json.loads(text)
    for worker in values["workers"]:
        worker["env"] |= env
    read = typed.decode(values, Plan)
    _check(read)
    return read


def _check(plan: Plan) -> None:
    """Raise ValueError where a name could not be one that we have made, or a worker is on no node."""
    for name in (plan.job_id, plan.project):
        if not NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no name of a job")
    for node in plan.nodes:
        if not NODE.fullmatch(node):
            raise ValueError(f"{node!r} is no name of a node")
    if not 0 < len(plan.nodes) <= 1 + MAX_TRAINERS or not 0 < plan.nproc_per_node <= MAX_WORKERS:
        raise ValueError(
            f"it has {len(plan.nodes)} nodes of {plan.nproc_per_node} workers, "
            f"and a job has 1 to {1 + MAX_TRAINERS} of 1 to {MAX_WORKERS}"
        )
    places = enumerate(node for node in plan.nodes for _ in range(plan.nproc_per_node))
    if [(worker.rank, worker.node) for worker in plan.workers] != list(places):
        raise ValueError("its ranks are not numbered from 0, or not on its nodes")
    if any(map(checks.path, plan.command)):
        raise ValueError("its command has text that no process can be given")
    for worker in plan.workers:
        for name, value in worker.env.items():
            if not name or "=" in name or checks.path(name) or checks.path(value):
                raise ValueError(f"rank {worker.rank} cannot be given the environment variable {name[:60]!a}")


def _limits(spec: JobSpec, inventory: Inventory, sharing: int) -> Limits:
    """The limits of a node, the same in every generation, however few nodes it has."""
    together = sharing or len(names(spec, spares=True))
    asked = UNLIMITED if inventory.engine == "process" else spec.memory
    return limits(asked, inventory.memory, math.ceil(together / inventory.hosts))


def _gpus(spec: JobSpec, inventory: Inventory) -> tuple[str, ...]:
    if spec.gpus == "none":
        return ()
    if spec.gpus != "auto" and not inventory.gpus:
        raise ResourceError(
            f"--gpus {spec.gpus}: {inventory.no_gpus}",
            "python -m orchestrate doctor lists the GPUs and what is missing; --gpus none trains with gloo on CPU",
        )
    if isinstance(spec.gpus, int):
        if spec.gpus > len(inventory.gpus):
            raise ResourceError(
                f"--gpus {spec.gpus}: there {_are(len(inventory.gpus))}: {', '.join(inventory.gpus)}",
                f"--gpus {len(inventory.gpus)}, or --gpus all",
            )
        return inventory.gpus[: spec.gpus]
    return inventory.gpus


def _own(spec: JobSpec, cores: tuple[int, ...], shared: bool) -> dict[str, str]:
    """What a node is asked about a worker, and NCCL of several on a GPU; only where it differs from the default."""
    own = {"WORKER_CORES": ",".join(map(str, cores))} if cores else {}
    own |= {} if spec.expand else {"WORKER_EXPAND": "false"}
    return own | ({"NCCL_MULTI_RANK_GPU_ENABLE": "1"} if shared else {})


def _cores(cores: tuple[int, ...]) -> str:
    return f"core{'s' if len(cores) > 1 else ''} {','.join(map(str, cores))}"


def counted(number: int, noun: str) -> str:
    """`1 node`, `2 nodes`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _are(number: int) -> str:
    return "is 1" if number == 1 else f"are {number}"
