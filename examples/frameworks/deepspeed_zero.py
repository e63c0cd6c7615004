"""DeepSpeed with ZeRO-1: `orchestrate run --nodes 2 examples/frameworks/deepspeed_zero.py`."""

import argparse
import os
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from data import dataset, digest, model
from torch.nn.functional import mse_loss

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
args = parser.parse_args()

deepspeed.init_distributed()
net = model()
engine, _, loader, _ = deepspeed.initialize(
    model=net,
    optimizer=torch.optim.AdamW(net.parameters(), lr=1e-2),  # DeepSpeed's own is compiled when it is first used
    training_data=dataset(),
    config={
        "train_micro_batch_size_per_gpu": 32,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
    },
)

checkpoints = Path(os.environ.get("JOB_DIR", ".")) / "checkpoints"
epoch = 0
if (checkpoints / "latest").exists():  # names the newest complete checkpoint
    epoch = engine.load_checkpoint(str(checkpoints))[1]["epoch"]
    print(f"resumed after epoch {epoch}", flush=True)
while epoch < args.epochs:
    loader.data_sampler.set_epoch(epoch)
    for features, target in loader:
        loss = mse_loss(engine(features.to(engine.device)), target.to(engine.device))
        engine.backward(loss)
        engine.step()
    epoch += 1
    engine.save_checkpoint(str(checkpoints), tag=f"epoch-{epoch}", client_state={"epoch": epoch})
print(
    f"rank {dist.get_rank()} of {dist.get_world_size()}: {engine.global_steps} steps, "
    f"weights {digest(engine.module.state_dict())}",
    flush=True,
)
dist.destroy_process_group()
