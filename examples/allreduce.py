"""A plain torchrun script, without any reference to orchestrate: one all-reduce over all workers."""

import argparse

import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--fail-rank", type=int, help="rank that raises an error")
args = parser.parse_args()

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
if rank == args.fail_rank:
    raise ValueError("the label of sample 17 is missing")
total = torch.tensor([float(rank)])
if torch.cuda.is_available():
    torch.cuda.set_device(rank % torch.cuda.device_count())
    total = total.cuda()
dist.all_reduce(total)
print(f"rank {rank} of {world_size}: the ranks add up to {total.item():g}")
dist.barrier()
dist.destroy_process_group()
