"""Lightning Fabric: `orchestrate run --nodes 2 --pip lightning examples/frameworks/lightning_fabric.py`."""

import argparse
import os
from pathlib import Path

import lightning as L
import torch
from data import dataset, digest, model
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
args = parser.parse_args()

fabric = L.Fabric()
fabric.launch()
net = model()
net, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
loader = fabric.setup_dataloaders(DataLoader(dataset(), batch_size=32, shuffle=True))

last = Path(os.environ.get("JOB_DIR", ".")) / "checkpoints" / "last.ckpt"
state = {"model": net, "optimizer": optimizer, "epoch": 0, "step": 0}
if last.exists():
    fabric.load(last, state)
    print(f"resumed after epoch {state['epoch']}", flush=True)
while state["epoch"] < args.epochs:
    for features, target in loader:
        optimizer.zero_grad()
        fabric.backward(mse_loss(net(features), target))
        optimizer.step()
        state["step"] += 1
    state["epoch"] += 1
    fabric.save(last.with_suffix(".new"), state)
    fabric.barrier()
    if fabric.is_global_zero:
        last.with_suffix(".new").replace(last)  # a reader finds the old or the new checkpoint, never half of one
weights = digest(net.module.state_dict())
print(f"rank {fabric.global_rank} of {fabric.world_size}: {state['step']} steps, weights {weights}", flush=True)
if torch.distributed.is_initialized():  # Fabric leaves it open, and torch may then abort while Python exits
    torch.distributed.destroy_process_group()
