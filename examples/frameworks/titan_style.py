"""FSDP2 as in torchtitan.

`orchestrate run --nodes 2 examples/frameworks/titan_style.py --job.dump_folder='$JOB_DIR'`
"""

import argparse
import dataclasses
import itertools
import json
import os
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from data import dataset, digest, model
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, DistributedSampler


@dataclasses.dataclass
class Config:
    """The options: `training_steps` is `--training.steps`."""

    job_dump_folder: str = "outputs"
    training_steps: int = 100
    training_local_batch_size: int = 32
    optimizer_lr: float = 1e-2
    checkpoint_interval: int = 10  # steps
    checkpoint_keep_latest_k: int = 2
    metrics_log_freq: int = 10  # steps


class TrainState:
    """The content of a checkpoint; DCP calls its methods."""

    def __init__(self, net, optimizer):
        self.net, self.optimizer, self.step = net, optimizer, 0

    def state_dict(self):
        """Return the state, with this rank's shards."""
        weights, moments = get_state_dict(self.net, self.optimizer)
        return {"model": weights, "optimizer": moments, "step": self.step}

    def load_state_dict(self, state):
        """Restore the state."""
        weights, moments, self.step = state["model"], state["optimizer"], state["step"]
        set_state_dict(self.net, self.optimizer, model_state_dict=weights, optim_state_dict=moments)


def complete(folder: Path) -> list[Path]:
    """Return the complete checkpoints, oldest first: those with `.metadata`, which is written last."""
    return sorted((path.parent for path in folder.glob("step-*/.metadata")), key=lambda path: int(path.name[5:]))


def save(state: TrainState, folder: Path, keep: int) -> None:
    """Save a checkpoint, then remove all but the `keep` latest."""
    dcp.save({"train": state}, checkpoint_id=folder / f"step-{state.step}")
    if dist.get_rank() == 0:
        for old in complete(folder)[:-keep]:
            shutil.rmtree(old)


@record
def main(config: Config) -> None:
    """Train, and write checkpoints and metrics to the dump folder."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(kind, int(os.environ["LOCAL_RANK"]) if kind == "cuda" else 0)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    mesh = init_device_mesh(kind, (dist.get_world_size(),), mesh_dim_names=("dp_shard",))  # selects the GPU, too
    torch.manual_seed(0)
    net = fully_shard(model().to(device), mesh=mesh["dp_shard"])
    state = TrainState(net, torch.optim.AdamW(net.parameters(), lr=config.optimizer_lr))
    loader = DataLoader(dataset(), config.training_local_batch_size, sampler=DistributedSampler(dataset()))

    dump = Path(config.job_dump_folder)
    checkpoints = dump / "checkpoints"
    checkpoints.mkdir(parents=True, exist_ok=True)
    if found := complete(checkpoints):
        dcp.load({"train": state}, checkpoint_id=found[-1])
        print(f"resumed after step {state.step}", flush=True)
    endless = itertools.chain.from_iterable(itertools.repeat(loader))
    batches = itertools.islice(endless, state.step % len(loader), None)
    while state.step < config.training_steps:
        features, target = next(batches)
        loss = mse_loss(net(features.to(device)), target.to(device))
        loss.backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
        state.step += 1
        if state.step % config.metrics_log_freq == 0:
            mean = loss.detach() / mesh.size()
            dist.all_reduce(mean)
            if dist.get_rank() == 0:
                print(f"step: {state.step}  loss: {mean.item():.4f}", flush=True)
                with open(dump / "metrics.jsonl", "a") as file:
                    file.write(json.dumps({"step": state.step, "loss": mean.item()}) + "\n")
        if state.step % config.checkpoint_interval == 0:
            save(state, checkpoints, config.checkpoint_keep_latest_k)
    whole = {name: tensor.full_tensor() for name, tensor in net.state_dict().items()}
    print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {state.step} steps, weights {digest(whole)}", flush=True)
    dist.destroy_process_group()


parser = argparse.ArgumentParser()
for option in dataclasses.fields(Config):
    flag = "--" + option.name.replace("_", ".", 1)
    parser.add_argument(flag, dest=option.name, type=type(option.default), default=option.default)
main(Config(**vars(parser.parse_args())))
