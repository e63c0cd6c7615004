"""Train and print the steps per second after a warm-up: `steady mnist|small`.

`mnist` is the PyTorch examples' network, with half of its batch for each of two workers; `small` takes about 5 ms per
step, most of it communication between the workers.
"""

import sys
import time

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from app.model import Mnist

WARM_UP = 50
STEPS = {"mnist": 100, "small": 400}

dist.init_process_group("gloo")
torch.manual_seed(1)
kind = sys.argv[1]
if kind == "mnist":
    net, x = Mnist(1, 28), torch.randn(32, 1, 28, 28)
else:
    net = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 256))
    x = torch.randn(64, 256)
y = torch.zeros(len(x), dtype=torch.int64)
model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(WARM_UP + STEPS[kind]):
    if step == WARM_UP:
        dist.barrier()
        began = time.perf_counter()
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
dist.barrier()
if dist.get_rank() == 0:
    print(f"steps per second: {STEPS[kind] / (time.perf_counter() - began):.2f}", flush=True)
dist.destroy_process_group()
