"""Ranks: the environment of each worker. The contract between a node and a training script."""

from __future__ import annotations

import re
import subprocess
from typing import Any

from orchestrate.node import frameworks
from orchestrate.node.trees import opened

MASTER_PORT = 29500  # torch's default
PORTS = 1000  # from this one on that generations use in turn, on a network of their own
Node = dict[str, Any]
Env = dict[str, str]


def assign(nodes: list[Node], nproc: int, master_addr: str, master_port: int, job_id: str, interface: str) -> list[Env]:
    """Return the environment of every worker, rank 0 first: torchrun's names, GPUs, threads, interfaces, frameworks.

    `nodes` holds, in node order, `name`, `host` (equal for nodes on one machine), `cpus` and `gpus` (of that machine:
    a count, and ids in one order for all). Nodes of one machine never share a GPU. A worker sees all GPUs of its node,
    its own at index `LOCAL_RANK`, as under torchrun. Raises ValueError if a machine has fewer GPUs than workers.
    """
    envs = []
    hosts = [node["host"] for node in nodes]
    for node_rank, node in enumerate(nodes):
        workers_on_host = hosts.count(node["host"]) * nproc
        first_gpu = hosts[:node_rank].count(node["host"]) * nproc
        gpus = node["gpus"][first_gpu : first_gpu + nproc]
        if node["gpus"] and len(node["gpus"]) < workers_on_host:
            raise ValueError(f"{workers_on_host} workers on one machine need as many GPUs; it has {len(node['gpus'])}")
        for local_rank in range(nproc):
            rank = node_rank * nproc + local_rank
            env = {
                "RANK": rank,
                "LOCAL_RANK": local_rank,
                "NODE_RANK": node_rank,
                "GROUP_RANK": node_rank,
                "ROLE_RANK": rank,
                "WORLD_SIZE": len(nodes) * nproc,
                "LOCAL_WORLD_SIZE": nproc,
                "GROUP_WORLD_SIZE": len(nodes),
                "ROLE_WORLD_SIZE": len(nodes) * nproc,
                "ROLE_NAME": "default",
                "MASTER_ADDR": master_addr,
                "MASTER_PORT": master_port,
                "TORCHELASTIC_RESTART_COUNT": 0,
                "TORCHELASTIC_MAX_RESTARTS": 0,
                "TORCHELASTIC_RUN_ID": job_id,
                "TORCHELASTIC_USE_AGENT_STORE": True,
                "OMP_NUM_THREADS": max(1, node["cpus"] // workers_on_host),
                "GLOO_SOCKET_IFNAME": interface,
                "NCCL_SOCKET_IFNAME": interface,
                "CUDA_VISIBLE_DEVICES": ",".join(gpus),
            }
            extra = frameworks.variables(len(nodes), nproc, on_gpus=bool(gpus))
            envs.append({key: str(value) for key, value in env.items()} | extra)
    return envs


FENCE = "generation"  # a file in the job's folder

# Variables that a user's own environment may set, and those that it must not.
DEFAULTS = {"OMP_NUM_THREADS", "TORCHELASTIC_USE_AGENT_STORE", *frameworks.NAMES}
CONTRACT = {*assign([{"host": "", "cpus": 1, "gpus": []}], 1, "", 0, "", "")[0], "JOB_ID", "JOB_DIR"}
CONTRACT |= {"WORKER_CORES", "WORKER_EXPAND", "WORKER_STDIN"}
CONTRACT -= DEFAULTS


def fence(job_dir: str | None) -> int:
    """The oldest generation that may start workers: the one in the file, or the next one if that is `over`."""
    try:
        with open(opened(f"{job_dir}/{FENCE}")) as file:
            number, *over = file.read(100).split()
            return int(number) + bool(over)
    except (OSError, ValueError):
        return 0


def gpu_ids(listing: str) -> list[str]:
    """Return the ids in the output of `nvidia-smi -L`; MIG instances replace their GPU."""
    ids: list[str] = []
    for match in re.finditer(r"\(UUID: ((GPU|MIG)-[^)\s]+)\)", listing):
        if match[2] == "MIG" and ids and ids[-1].startswith("GPU-"):
            ids.pop()
        ids.append(match[1])
    return ids


def gpus() -> list[str]:
    """Return the ids of the GPUs that are visible on this machine or in this container."""
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
    except (OSError, subprocess.CalledProcessError):
        return []
    return gpu_ids(listing.stdout.decode(errors="replace"))
