"""Files for engines that others maintain: the same job on Kubernetes, on Slurm, or by Compose alone.

Pure: from a spec to text. In each of them a node is `orchestrate/node` without an orchestrator: so the workers'
environment is the same as here, and so are checkpoints and logs in the job's folder.
"""

from __future__ import annotations

from dataclasses import dataclass

from orchestrate.errors import UsageError
from orchestrate.limits import UNLIMITED
from orchestrate.spec import IMAGE, JobSpec

MASTER_PORT = 29500  # torch's default


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How a job looks from outside."""

    name: str
    nodes: int
    nproc: int  # workers on each node
    gpus: int  # on each node
    env: dict[str, str]
    memory: str  # limit of each node; empty for none


def shape(spec: JobSpec, name: str) -> Shape:
    """The shape of a job on machines that cannot be asked what they have; raises UsageError where that must be said."""
    nodes = spec.trainers + 1
    if isinstance(spec.gpus, int):
        if spec.gpus % nodes:
            raise UsageError(f"{spec.gpus} GPUs cannot be shared out evenly to {nodes} nodes", f"--gpus {nodes}")
        gpus = spec.gpus // nodes
        nproc = spec.nproc_per_node or gpus
        if nproc != gpus:
            raise UsageError(
                f"{nproc} workers and {gpus} GPUs on a node", "a worker has one GPU: leave one of them out"
            )
    else:
        nproc = spec.nproc_per_node or 1
        gpus = nproc if spec.gpus == "all" else 0
    if spec.pin or spec.network == "host":
        raise UsageError("pin and network are for this machine", "leave them out of a job that you export")
    if spec.constraints or spec.encrypt:
        raise UsageError(
            "constraints and encrypt are Swarm's",
            "leave them out, and say in the file what the other engine has for them",
        )
    env = {
        "NODE_MODE": "given",
        "NODE_NPROC": str(nproc),
        "NNODES": str(nodes),
        "NODE_GRACE": f"{spec.grace:g}",
        "JOB_ID": name,
        "TORCHELASTIC_RUN_ID": name,
        "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
        "PYTHONUNBUFFERED": "1",
    }
    if not gpus:
        env["CUDA_VISIBLE_DEVICES"] = ""
    if spec.cpus:
        env["OMP_NUM_THREADS"] = str(max(1, int(spec.cpus) // nproc))
    memory = "" if spec.memory == UNLIMITED else spec.memory or ""
    return Shape(name=name, nodes=nodes, nproc=nproc, gpus=gpus, env=env | spec.env, memory=memory)


def carries_node(image: str) -> bool:
    """Whether an image is one of ours, by its name, and so holds the program of a node."""
    return image.rpartition("/")[2].partition(":")[0].partition("@")[0] == IMAGE.partition(":")[0]
