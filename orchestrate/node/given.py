"""Mode `given`: somebody else (Kubernetes, Slurm, or a person) says which node this is, and how many there are."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from functools import partial

from orchestrate.node.loop import Loop
from orchestrate.node.output import say
from orchestrate.node.place import interface_to
from orchestrate.node.protocol import MOST_NODES, MOST_WORKERS, integer
from orchestrate.node.ranks import Env, assign, gpus

NAMES = {  # what we need, and where others have it: our own names, Kubeflow Trainer's, Kubernetes', Slurm's
    "NODE_RANK": ("PET_NODE_RANK", "JOB_COMPLETION_INDEX", "SLURM_NODEID"),
    "NNODES": ("PET_NNODES", "SLURM_NNODES"),
    "NODE_NPROC": ("PET_NPROC_PER_NODE",),
    "MASTER_ADDR": ("PET_MASTER_ADDR",),
    "MASTER_PORT": ("PET_MASTER_PORT",),
}
LOOPBACK = ("lo", "lo0")


def envs(environ: Mapping[str, str], own_gpus: list[str], cores: int) -> list[Env]:
    """The environments of the workers of this node, out of the node's own.

    Raises KeyError for what is missing, ValueError for what is no number, or where there are fewer GPUs than workers.
    With `RANK` in it there is one worker, for which all is said. What the environment says of threads, interfaces,
    restarts or a job's name stands.
    """
    if "RANK" in environ:
        integer(environ, "RANK")
        return [{}]
    told = {
        name: next((environ[key] for key in (name, *others) if environ.get(key)), "") for name, others in NAMES.items()
    }
    for name in ("NODE_RANK", "NNODES", "MASTER_ADDR"):
        if not told[name]:
            raise KeyError(name)
    counted = told["NODE_NPROC"].isdigit()  # else it is `auto`, say
    nproc = integer(told, "NODE_NPROC", least=1, most=MOST_WORKERS) if counted else max(1, len(own_gpus))
    rank, nodes = integer(told, "NODE_RANK"), integer(told, "NNODES", least=1, most=MOST_NODES)
    if rank >= nodes:
        raise ValueError(f"NODE_RANK is {rank}, and there are {nodes} nodes")
    port = integer(told, "MASTER_PORT", default=29500, least=1, most=65535)
    interface = interface_to(told["MASTER_ADDR"])
    interface = "" if interface in LOOPBACK and nodes > 1 else interface
    machines = [{"host": str(number), "cpus": cores, "gpus": own_gpus} for number in range(nodes)]
    job = environ.get("JOB_ID", "job")
    everyone = assign(machines, nproc, told["MASTER_ADDR"], port, job, interface)
    stands = {"OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", *_restarts(environ)} & environ.keys()
    return [
        {name: value for name, value in env.items() if value or not name.endswith("_IFNAME")}
        | {name: environ[name] for name in stands}
        for env in everyone[rank * nproc : (rank + 1) * nproc]
    ]


def given(command: list[str]) -> int:
    """Run this node's workers; return the first failure's exit code, or 0. One that fails ends the others."""
    try:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        found = envs(os.environ, own_gpus(), cores)
    except KeyError as error:
        say(f"error: NODE_MODE is given, and there is no {error.args[0]}")
        return 2
    except ValueError as error:
        say(f"error: {error}")
        return 2
    codes: list[int] = []
    loop = Loop()

    def ended(rank: str, code: int) -> None:
        codes.append(code)
        if code and not loop.ending:
            say(f"rank {rank} failed with exit code {code}")
            _note(code)
            loop.stop(end=True)
        loop.ending = loop.ending or len(codes) == len(found)

    for env in found:
        loop.start(command, {**os.environ, **env}, None, partial(ended, env.get("RANK", "0")))
    loop.run()
    return next(filter(None, codes), 0)


def own_gpus() -> list[str]:
    """The GPUs of this node: those that a scheduler names, which may be none, else all that can be seen."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return gpus() if named is None else [name for name in named.split(",") if name]


def _note(code: int) -> None:
    """Write the code of the first failure of all to the file that `NODE_FAILED` names: srun tells only the highest."""
    if path := os.environ.get("NODE_FAILED"):
        with contextlib.suppress(OSError), open(path, "x") as file:
            file.write(str(code))


def _restarts(environ: Mapping[str, str]) -> set[str]:
    return {name for name in environ if name.startswith("TORCHELASTIC_")}
