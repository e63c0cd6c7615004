"""Print the bus bandwidth of all_reduce by size, as JSON; `gpu_allreduce.py DEVICE BACKEND LARGEST_SIZE RUNS`.

Bus bandwidth is defined as in nccl-tests: size ÷ time × 2(n-1)/n, in GB/s, comparable with the hardware's for any n.
"""

import json
import os
import sys
import time

import torch
import torch.distributed as dist

SMALLEST, FACTOR, WARM_UP = 1 << 10, 4, 3
kind, backend, largest, runs = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
device = torch.device(kind)
if kind == "cuda":
    device = torch.device(kind, int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
dist.init_process_group(backend, device_id=device if backend == "nccl" else None)
ranks = dist.get_world_size()


def seconds(x: torch.Tensor, repeat: int) -> float:
    """Seconds per all-reduce on the slowest rank."""
    dist.barrier()
    started = time.perf_counter()
    for _ in range(repeat):
        dist.all_reduce(x)
    if kind == "cuda":
        torch.cuda.synchronize()
    took = torch.tensor([(time.perf_counter() - started) / repeat], dtype=torch.float64, device=device)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took.item())


size = SMALLEST
while size <= largest:
    message = torch.zeros(size // 4, device=device)
    repeat = 20 if size <= 1 << 24 else 5
    seconds(message, WARM_UP)
    rates = [size / seconds(message, repeat) * 2 * (ranks - 1) / ranks / 1e9 for _ in range(runs)]
    if dist.get_rank() == 0:
        print(json.dumps({"bytes": size, "bandwidth": rates}), flush=True)
    size *= FACTOR
dist.barrier()
dist.destroy_process_group()
