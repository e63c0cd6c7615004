"""Plain DistributedDataParallel: `orchestrate run --nodes 2 examples/frameworks/ddp.py`."""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from data import dataset, digest, model
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
args = parser.parse_args()

cuda = torch.cuda.is_available()
dist.init_process_group("nccl" if cuda else "gloo")
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
net = DistributedDataParallel(model().to(device))
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
sampler = DistributedSampler(dataset())
loader = DataLoader(dataset(), batch_size=32, sampler=sampler)

last = Path(os.environ.get("JOB_DIR", ".")) / "checkpoints" / "last.pt"
epoch = step = 0
if last.exists():
    state = torch.load(last, map_location=device)
    net.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    epoch, step = state["epoch"], state["step"]
    print(f"resumed after epoch {epoch}", flush=True)
while epoch < args.epochs:
    sampler.set_epoch(epoch)
    for features, target in loader:
        optimizer.zero_grad()
        mse_loss(net(features.to(device)), target.to(device)).backward()
        optimizer.step()
        step += 1
    epoch += 1
    if dist.get_rank() == 0:
        state = {"model": net.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch, "step": step}
        torch.save(state, last.with_suffix(".new"))
        last.with_suffix(".new").replace(last)  # a reader finds the old or the new checkpoint, never half of one
print(
    f"rank {dist.get_rank()} of {dist.get_world_size()}: {step} steps, weights {digest(net.module.state_dict())}",
    flush=True,
)
dist.destroy_process_group()
