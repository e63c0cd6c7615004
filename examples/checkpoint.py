"""A script for torchrun that continues from its last checkpoint, which it saves every ten steps: linear regression."""

import argparse
import os
import signal
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--pause", type=float, default=0.0, metavar="SECONDS", help="duration of a step on larger data")
parser.add_argument("--kill-rank", type=int, help="rank that is killed at step 25 of the first attempt")
args = parser.parse_args()

dist.init_process_group("gloo")
rank = dist.get_rank()
path = os.path.join(os.environ.get("JOB_DIR", "."), "checkpoints", "last.pt")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
first = 1
if os.path.exists(path):
    saved = torch.load(path)
    model.load_state_dict(saved["model"])
    first = saved["step"] + 1
    if rank == 0:
        print(f"continuing after step {first - 1}", flush=True)

for step in range(first, args.steps + 1):
    inputs, noise = torch.randn(32, 9, generator=torch.Generator().manual_seed(1000 * step + rank)).split((8, 1), dim=1)
    loss = (model(inputs) - inputs.sum(1, keepdim=True) - 0.3 * noise).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    time.sleep(args.pause)
    if rank == args.kill_rank and step == 25 and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    if step % 10 == 0:
        if rank == 0:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            torch.save({"step": step, "model": model.state_dict()}, path + ".new")
            os.replace(path + ".new", path)  # a checkpoint is either complete or absent
            print(f"step {step} of {args.steps}: loss {loss.item():.4f}", flush=True)
        dist.barrier()

dist.destroy_process_group()
