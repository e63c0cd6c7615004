"""A training for T5 that prints how many steps it does in a second, once it has warmed up."""

import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

WARM_UP, STEPS = 50, 400

dist.init_process_group("gloo")
torch.manual_seed(1)
net = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 256))
model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x = torch.randn(64, 256)
for step in range(WARM_UP + STEPS):
    if step == WARM_UP:
        dist.barrier()
        began = time.perf_counter()
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
dist.barrier()
if dist.get_rank() == 0:
    print(f"steps per second: {STEPS / (time.perf_counter() - began):.2f}", flush=True)
dist.destroy_process_group()
