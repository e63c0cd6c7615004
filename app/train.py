"""Train the MNIST network with DistributedDataParallel, on however many workers the environment names.

    python -m orchestrate run                                   four nodes
    python -m orchestrate run -- -m app.train --epochs 5        the same with arguments
    torchrun --nproc-per-node 2 -m app.train                    under torchrun
    python -m app.train                                         one process

It reads torchrun's variables (`RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `MASTER_ADDR`, `MASTER_PORT`) and writes to
`$JOB_DIR` (else `runs/app`): `metrics.jsonl`, `checkpoints/last.pt`, `checkpoints/best.pt`.
"""

import argparse
import json
import math
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from app import checkpoint, data
from app.model import Net


def arguments() -> argparse.Namespace:
    """The command line; defaults follow the PyTorch examples' MNIST script."""
    home = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "orchestrate"
    parser = argparse.ArgumentParser(prog="python -m app.train", description="Train digits on every worker.")
    parser.add_argument("--dataset", choices=["digits", "mnist"], default="digits", help="digits are drawn offline")
    parser.add_argument("--data", type=Path, default=home, metavar="DIR", help="folder of the data set")
    parser.add_argument("--download", action="store_true", help="get MNIST from the network if it is not in DIR")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64, help="of all workers together")
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument("--gamma", type=float, default=0.7, help="learning rate factor per epoch")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--resume", default="none", metavar="auto|none|PATH", help="auto: the job's own newest")
    args = parser.parse_args()
    for name in ("epochs", "batch_size"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    return args


class Job:
    """This worker's place in the job."""

    def __init__(self) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.folder = Path(os.environ.get("JOB_DIR", "runs/app"))
        self.device = torch.device("cpu")
        if torch.cuda.is_available():
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(self.device)
        elif os.environ.get("CUDA_VISIBLE_DEVICES"):
            self.say("warning: a GPU was given, but torch cannot use it: training on the CPU")
        if self.world_size > 1:
            dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo")

    def say(self, text: str) -> None:
        """Print from rank 0."""
        if self.rank == 0:
            print(text, flush=True)

    def record(self, **metrics: Any) -> None:
        """Append a line to metrics.jsonl from rank 0."""
        if self.rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(metrics) + "\n")

    def sum(self, values: list[float]) -> list[float]:
        """Each value summed over all workers."""
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        if self.world_size > 1:
            dist.all_reduce(total)
        return [float(value) for value in total]

    def broadcast(self, tensors: list[Tensor] | None) -> list[Tensor]:
        """Rank 0's tensors (uint8 images and int64 labels, in turns) on the device of every worker."""
        if self.world_size == 1:
            assert tensors is not None
            return [tensor.to(self.device) for tensor in tensors]
        counts = torch.tensor([len(tensor) for tensor in tensors] if tensors else [0] * 4, device=self.device)
        dist.broadcast(counts, src=0)
        received = []
        for i, count in enumerate(counts.tolist()):
            empty = torch.empty(count, dtype=torch.int64) if i % 2 else torch.empty(count, 28, 28, dtype=torch.uint8)
            tensor = (tensors[i] if tensors else empty).to(self.device)
            dist.broadcast(tensor, src=0)
            received.append(tensor)
        return received


def evaluate(job: Job, model: nn.Module, images: Tensor, labels: Tensor) -> tuple[float, float]:
    """Mean loss and accuracy over all test images, each of which exactly one worker looks at."""
    model.eval()
    loss = correct = 0.0
    with torch.no_grad():
        for part in torch.arange(job.rank, len(images), job.world_size, device=job.device).split(500):
            output = model(data.normalised(images[part]))
            loss += float(F.nll_loss(output, labels[part], reduction="sum"))
            correct += float((output.argmax(1) == labels[part]).sum())
    loss, correct = job.sum([loss, correct])
    return loss / len(images), correct / len(images)


def main() -> None:
    """Build, train, close."""
    args = arguments()
    job = Job()
    print(f"rank {job.rank} of {job.world_size} on {job.device}", flush=True)
    folder = job.folder / "checkpoints"

    tensors = data.load(args.dataset, args.data, args.download) if job.rank == 0 else None
    images, labels, test_images, test_labels = job.broadcast(tensors)
    torch.manual_seed(args.seed)
    net = Net().to(job.device)
    optimizer = torch.optim.Adadelta(net.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=args.gamma)
    parts = {"model": net, "optimizer": optimizer, "scheduler": scheduler}
    first_epoch, step, best = 1, 0, 0.0

    resume = folder / "last.pt" if args.resume == "auto" else Path(args.resume)
    if args.resume != "none" and (resume.exists() or args.resume != "auto"):
        state = checkpoint.load(resume)
        for name, part in parts.items():
            part.load_state_dict(state[name])
        first_epoch, step, best = state["epoch"] + 1, state["step"], state["best"]
        job.say(f"resumed from {resume} after epoch {state['epoch']}")

    model: nn.Module = DistributedDataParallel(net) if job.world_size > 1 else net
    torch.manual_seed(args.seed + job.rank)  # dropout differs between workers; the weights do not
    sampler = DistributedSampler(images, job.world_size, job.rank, seed=args.seed)  # type: ignore[arg-type]
    share = math.ceil(args.batch_size / job.world_size)

    for epoch in range(first_epoch, args.epochs + 1):
        started = time.monotonic()
        sampler.set_epoch(epoch)
        model.train()
        for batch in torch.tensor(list(sampler), device=job.device).split(share):
            optimizer.zero_grad()
            loss = F.nll_loss(model(data.normalised(images[batch])), labels[batch])
            loss.backward()
            optimizer.step()
            step += 1
            job.record(kind="step", epoch=epoch, step=step, loss=loss.item())
        scheduler.step()
        test_loss, accuracy = evaluate(job, net, test_images, test_labels)
        seconds = time.monotonic() - started
        job.record(kind="epoch", epoch=epoch, step=step, test_loss=test_loss, test_accuracy=accuracy, seconds=seconds)
        job.say(f"epoch {epoch}/{args.epochs}: accuracy {accuracy:.2%}, loss {test_loss:.4f}, {seconds:.1f} s")
        if job.rank == 0:
            is_best, best = accuracy > best, max(accuracy, best)
            state = {name: part.state_dict() for name, part in parts.items()}
            state |= {"epoch": epoch, "step": step, "best": best}
            for name in ["last.pt", "best.pt"] if is_best else ["last.pt"]:
                checkpoint.save(state, folder / name)

    if job.world_size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
