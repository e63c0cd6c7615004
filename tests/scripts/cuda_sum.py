# ruff: noqa: E402
"""Add up the ranks, on GPUs if the job has them, and print facts about this worker as one line of JSON."""

import sys

FORKED = "torch" in sys.modules  # by a process that has imported it

import json
import os

import torch
import torch.distributed as dist
from cuda_place import device, join, uuid

where = device()
backend = join(where)
total = torch.full((1 << 20,), float(dist.get_rank()), device=where)
dist.all_reduce(total)
facts = {
    "forked": FORKED,
    "device": where.type,
    "gpu": uuid() if where.type == "cuda" else "",
    "usable": torch.cuda.is_available(),
    "visible": torch.cuda.device_count(),
    "backend": backend,
    "nccl": torch.cuda.nccl.version() if where.type == "cuda" else None,
    "sums": total.unique().tolist(),
    "env": {name: os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "NCCL_MULTI_RANK_GPU_ENABLE")},
}
print(json.dumps(facts), flush=True)
dist.barrier()
dist.destroy_process_group()
