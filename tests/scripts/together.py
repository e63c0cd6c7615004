"""Compute with torch for four seconds: alone, or in a group whose workers do nothing else or add up tensors.

`together.py alone|group|sums`.
"""

import sys
import time

import torch
import torch.distributed as dist

how, tensor = sys.argv[1], torch.ones(4096)
if how != "alone":
    dist.init_process_group("gloo")
end = time.monotonic() + 4
while True:
    done = torch.tensor([float(time.monotonic() > end)])
    if how == "sums":
        dist.all_reduce(tensor)
        dist.all_reduce(done)  # so that all workers take the same number of steps
    if done.item():
        break
if how != "alone":
    dist.destroy_process_group()
