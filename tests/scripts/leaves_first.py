"""Rank 0 ends first; each other worker then creates a group, for which it needs torch's store."""

import contextlib

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
dist.all_reduce(torch.ones(1))
if rank:
    with contextlib.suppress(RuntimeError):  # once rank 0 has ended
        dist.recv(torch.zeros(1), src=0)
    together = dist.new_group(range(1, size), use_local_synchronization=True)
    dist.barrier(together)
    print("made a group", flush=True)
else:
    dist.destroy_process_group()  # without it, torch aborts in one of thirty such exits
