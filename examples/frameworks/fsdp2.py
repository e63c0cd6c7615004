"""FSDP2 with a distributed checkpoint: `orchestrate run --nodes 2 examples/frameworks/fsdp2.py`."""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from data import dataset, digest, model
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
args = parser.parse_args()

kind = "cuda" if torch.cuda.is_available() else "cpu"
dist.init_process_group("nccl" if kind == "cuda" else "gloo")
device = torch.device(kind, int(os.environ["LOCAL_RANK"]) if kind == "cuda" else 0)
torch.manual_seed(0)
net = model().to(device)
mesh = init_device_mesh(kind, (dist.get_world_size(),))
for layer in (*net, net):
    if any(True for _ in layer.parameters()):
        fully_shard(layer, mesh=mesh)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
sampler = DistributedSampler(dataset())
loader = DataLoader(dataset(), batch_size=32, sampler=sampler)

checkpoints = Path(os.environ.get("JOB_DIR", ".")) / "checkpoints"
complete = sorted(checkpoints.glob("epoch-*/.metadata"))  # which is written last
epoch = step = 0
if complete:
    weights, state = get_state_dict(net, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=str(complete[-1].parent))
    set_state_dict(net, optimizer, model_state_dict=weights, optim_state_dict=state)
    epoch = int(complete[-1].parent.name.removeprefix("epoch-"))
    step = epoch * len(loader)
    print(f"resumed after epoch {epoch}", flush=True)
while epoch < args.epochs:
    sampler.set_epoch(epoch)
    for features, target in loader:
        optimizer.zero_grad()
        mse_loss(net(features.to(device)), target.to(device)).backward()
        optimizer.step()
        step += 1
    epoch += 1
    weights, state = get_state_dict(net, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=str(checkpoints / f"epoch-{epoch:04}"))
whole = {name: tensor.full_tensor() for name, tensor in net.state_dict().items()}
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {step} steps, weights {digest(whole)}", flush=True)
dist.destroy_process_group()
