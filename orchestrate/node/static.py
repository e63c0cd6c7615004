"""Mode `static`: Kubernetes, Slurm or a user sets the rank of this node and the number of nodes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from functools import partial

from orchestrate.node.local_env import interface_to
from orchestrate.node.loop import Loop
from orchestrate.node.messages.checks import MAX_NODES, MAX_WORKERS, integer
from orchestrate.node.output import print_message
from orchestrate.node.ranks import DEFAULTS, MASTER_PORT, Env, assign, gpus

NAMES = {  # the variables that may hold each value: our own, then those of Kubeflow Trainer, Kubernetes and Slurm
    "NODE_RANK": ("PET_NODE_RANK", "JOB_COMPLETION_INDEX", "SLURM_NODEID"),
    "NNODES": ("PET_NNODES", "SLURM_NNODES"),
    "NODE_NPROC": ("PET_NPROC_PER_NODE",),
    "MASTER_ADDR": ("PET_MASTER_ADDR",),
    "MASTER_PORT": ("PET_MASTER_PORT",),
}
LOOPBACK = ("lo", "lo0")
STORE_INTERVAL = 0.1  # seconds between two looks at the clients of torch's store


def envs(environ: Mapping[str, str], own_gpus: list[str], cores: int) -> list[Env]:
    """The environments of this node's workers, derived from the node's own.

    Raises KeyError for a missing variable, ValueError for one that is not a number or if there are fewer GPUs than
    workers. If `RANK` is set, there is one worker, and its environment is complete. Variables for threads, interfaces,
    restarts and the job's name are kept as they are.
    """
    if "RANK" in environ:
        integer(environ, "RANK")
        return [{}]
    values = {
        name: next((environ[key] for key in (name, *others) if environ.get(key)), "") for name, others in NAMES.items()
    }
    for name in ("NODE_RANK", "NNODES", "MASTER_ADDR"):
        if not values[name]:
            raise KeyError(name)
    is_number = values["NODE_NPROC"].isdigit()  # otherwise it may be `auto`
    nproc = integer(values, "NODE_NPROC", least=1, most=MAX_WORKERS) if is_number else max(1, len(own_gpus))
    rank, nodes = integer(values, "NODE_RANK"), integer(values, "NNODES", least=1, most=MAX_NODES)
    if rank >= nodes:
        raise ValueError(f"NODE_RANK is {rank}, but there are only {nodes} nodes")
    port = integer(values, "MASTER_PORT", default=MASTER_PORT, least=1, most=65535)
    interface = interface_to(values["MASTER_ADDR"])
    interface = "" if interface in LOOPBACK and nodes > 1 else interface
    machines = [{"host": str(number), "cpus": cores, "gpus": own_gpus} for number in range(nodes)]
    job = environ.get("JOB_ID", "job")
    all_envs = assign(machines, nproc, values["MASTER_ADDR"], port, job, interface)
    kept = {*DEFAULTS, "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", *_restarts(environ)} & environ.keys()
    return [
        {name: value for name, value in env.items() if value or not name.endswith("_IFNAME")}
        | {name: environ[name] for name in kept}
        for env in all_envs[rank * nproc : (rank + 1) * nproc]
    ]


def static(command: list[str]) -> int:
    """Run this node's workers; return the exit code of the first failure, or 0. A failure ends the other workers."""
    try:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        found = envs(os.environ, own_gpus(), cores)
    except KeyError as error:
        print_message(f"error: NODE_MODE is static, but {error.args[0]} is not set")
        return 2
    except ValueError as error:
        print_message(f"error: {error}")
        return 2
    codes: list[int] = []
    loop = Loop()

    def ended(rank: str, code: int) -> None:
        codes.append(code)
        if code and not loop.ending:
            print_message(f"rank {rank} failed with exit code {code}")
            _record_failure(code)
            loop.stop(end=True)
        if len(codes) == len(found):
            wait()

    def wait() -> None:
        """End once no worker of another node is connected to torch's store."""
        if loop.ending or not loop.store or not loop.store.in_use():
            loop.ending = True
        else:
            loop.after(STORE_INTERVAL, wait)

    for env in found:
        loop.start(command, {**os.environ, **env}, None, partial(ended, env.get("RANK", "0")))
    loop.run()
    return next(filter(None, codes), 0)


def own_gpus() -> list[str]:
    """The GPUs of this node: those that the scheduler has assigned (possibly none), otherwise all visible ones."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return gpus() if named is None else [name for name in named.split(",") if name]


def _record_failure(code: int) -> None:
    """Write the exit code of the first failure to the file `$NODE_FAILED`: srun reports only the highest code."""
    if path := os.environ.get("NODE_FAILED"):
        with contextlib.suppress(OSError), open(path, "x") as file:
            file.write(str(code))


def _restarts(environ: Mapping[str, str]) -> set[str]:
    return {name for name in environ if name.startswith("TORCHELASTIC_")}
