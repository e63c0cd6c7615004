"""Accelerate: `orchestrate run --nodes 2 --pip accelerate examples/frameworks/accelerate_loop.py`."""

import argparse
import os
from pathlib import Path

import torch
from accelerate import Accelerator
from data import dataset, digest, model
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
args = parser.parse_args()

accelerator = Accelerator()
net = model()
net, optimizer, loader = accelerator.prepare(
    net, torch.optim.AdamW(net.parameters(), lr=1e-2), DataLoader(dataset(), batch_size=32, shuffle=True)
)
last = Path(os.environ.get("JOB_DIR", ".")) / "checkpoints" / "last"
epoch = step = 0
if last.exists():
    accelerator.load_state(str(last.resolve()))
    epoch = int(last.resolve().name.rpartition("-")[2])
    step = epoch * len(loader)
    print(f"resumed after epoch {epoch}", flush=True)
while epoch < args.epochs:
    for features, target in loader:
        optimizer.zero_grad()
        accelerator.backward(mse_loss(net(features), target))
        optimizer.step()
        step += 1
    epoch += 1
    folder = last.with_name(f"epoch-{epoch}")
    accelerator.save_state(str(folder))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:  # the link names the newest complete checkpoint
        new = last.with_name("new")
        new.unlink(missing_ok=True)
        new.symlink_to(folder.name)
        new.replace(last)
rank, world_size = accelerator.process_index, accelerator.num_processes
print(
    f"rank {rank} of {world_size}: {step} steps, weights {digest(accelerator.unwrap_model(net).state_dict())}",
    flush=True,
)
accelerator.end_training()
