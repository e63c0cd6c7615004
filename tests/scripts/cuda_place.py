"""The device of a test's worker, and a process group that works there."""

import os

import torch
import torch.distributed as dist

LOCAL_RANK = int(os.environ["LOCAL_RANK"])


def device() -> torch.device:
    """This worker's own GPU, or the CPU in a job without GPUs."""
    if not os.environ["CUDA_VISIBLE_DEVICES"]:
        return torch.device("cpu")
    torch.cuda.set_device(LOCAL_RANK)
    return torch.device("cuda", LOCAL_RANK)


def join(where: torch.device) -> str:
    """Join the process group; return its backend.

    It is NCCL for GPUs, except where workers share one and NCCL is too old for that.
    """
    shared = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" and torch.cuda.nccl.version() < (2, 30)
    backend = "nccl" if where.type == "cuda" and not shared else "gloo"
    dist.init_process_group(backend, device_id=where if backend == "nccl" else None)
    return backend


def uuid() -> str:
    """The UUID of this worker's GPU, without `GPU-` or `MIG-`."""
    return str(torch.cuda.get_device_properties(LOCAL_RANK).uuid)
