"""Train a model on any number of workers, with one of four strategies.

    python -m orchestrate run                                        four nodes
    python -m orchestrate run -- -m app.train --strategy manual      the same with arguments
    torchrun --nproc-per-node 2 -m app.train                         under torchrun
    python -m app.train --spawn 2                                    with torch.multiprocessing, on this machine
    python -m app.train --strategy single                            one process

It reads torchrun's variables (`RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `MASTER_ADDR`, `MASTER_PORT`) and writes
`metrics.jsonl` and `checkpoints/` to `$JOB_DIR` (default `runs/app`). After SIGTERM, all workers save at the same step
and exit.
"""

import argparse
import json
import math
import os
import pickle
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from app import data, model, replicas, strategy
from app.checkpoint import Checkpoints, load
from app.job import STOPPED, Job, append, leave, spawn
from app.order import GlobalOrder, ShardOrder
from app.shards import Shards
from app.stopwatch import Stopwatch

FIXED = ("batch_size", "seed", "dataset", "model", "optimizer")  # arguments that must not change on resume
REPORT_EVERY = 10  # steps whose losses are reduced together, after which all workers agree whether to stop


def arguments() -> argparse.Namespace:
    """The command line; the defaults follow the PyTorch examples' MNIST script, with twice its batch and its rate."""
    parser = argparse.ArgumentParser(prog="python -m app.train", description="Train a model with one or more workers.")
    add, default = parser.add_argument, "(default %(default)s)"
    add("--strategy", choices=strategy.NAMES, default="ddp", help=f"training strategy {default}")
    add("--spawn", type=int, metavar="N", help="start N workers on this machine")
    add("--model", choices=model.NAMES, default="lenet", help=f"model {default}")
    names = ", ".join(data.NAMES)
    add("--dataset", default="digits", metavar="NAME|shards:DIR", help=f"{names}, or shards in DIR {default}")
    add("--data", type=Path, default=data.HOME, metavar="DIR", help=f"folder of the dataset {default}")
    add("--download", action="store_true", help="download the dataset if it is not in DIR")
    add("--augment", action="store_true", help="shift images at random, and mirror color images")
    add("--epochs", type=int, default=3, help=f"number of epochs {default}")
    add("--batch-size", type=int, default=128, help=f"global batch size of all workers {default}")
    add("--accumulate", type=int, default=1, metavar="K", help=f"parts of a batch, to save memory {default}")
    add("--optimizer", choices=["adadelta", "sgd", "adamw"], default="adadelta", help=f"optimizer {default}")
    add("--lr", type=float, help="learning rate (default 2.0 for adadelta, 0.05 for sgd, 0.001 for adamw)")
    schedules = ["step", "cosine", "none"]
    add("--schedule", choices=schedules, default="step", help=f"schedule; step: times --gamma each epoch {default}")
    add("--gamma", type=float, default=0.7, help=f"factor of the step schedule {default}")
    add("--dropout", type=float, default=1.0, help=f"factor on the model's dropout rates {default}")
    add("--dtype", choices=["float32", "float64"], default="float32", help=f"data type of weights and images {default}")
    half = ["auto", "float16", "bfloat16"]
    add("--amp", nargs="?", const="auto", choices=half, help="mixed precision; auto: float16 on GPUs, bfloat16 on CPUs")
    modes = ["default", "reduce-overhead", "max-autotune"]
    add("--compile", nargs="?", const="default", choices=modes, help="mode of torch.compile (default: not compiled)")
    add("--deterministic", action="store_true", help="make runs on GPUs bit-identical too, with slower kernels")
    add("--seed", type=int, default=1, help=f"random seed {default}")
    add("--save-every", type=int, default=0, metavar="STEPS", help="also save every STEPS steps within an epoch")
    add("--keep", type=int, default=2, help=f"number of recent checkpoints to keep besides the best {default}")
    add("--resume", default="none", metavar="auto|none|DIR", help="checkpoint to resume from; auto: the job's newest")
    add("--init-from", type=Path, metavar="DIR", help="initialize weights from a checkpoint where they match")
    add(
        "--check-replicas", type=int, default=0, metavar="STEPS", help="compare parameters of workers every STEPS steps"
    )
    add("--ledger", action="store_true", help="write each worker's samples to ledger-RANK.jsonl")
    add("--skew-rank", type=int, help="corrupt this rank's gradients, to test --check-replicas")
    args = parser.parse_args()
    for name in ("epochs", "batch_size", "accumulate", "keep", "spawn"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if args.dataset not in data.NAMES and not args.dataset.startswith("shards:"):
        parser.error(f"--dataset {args.dataset}: choose from {', '.join(data.NAMES)}, or shards:DIR")
    return args


class Samples:
    """This worker's training and test samples, and the order in which it takes them."""

    def __init__(self, job: Job, args: argparse.Namespace) -> None:
        self.order: GlobalOrder | ShardOrder
        if args.dataset.startswith("shards:"):
            folder = Path(args.dataset.removeprefix("shards:"))
            train, test = (Shards(folder, part, job.rank, job.world_size) for part in ("train", "test"))
            self.images, self.labels, self.ids = train.images.to(job.device), train.labels.to(job.device), train.ids
            self.test_images, self.test_labels = test.images.to(job.device), test.labels.to(job.device)
            self.count = sum(train.counts)
            self.order = ShardOrder(train.counts, args.batch_size, job.rank, args.seed, job.device)
        else:
            tensors = data.load(args.dataset, args.data, args.download) if job.rank == 0 else None
            kinds = [(4, torch.uint8), (1, torch.int64)] * 2
            self.images, self.labels, test_images, test_labels = job.broadcast(tensors, kinds)
            part = slice(job.rank, None, job.world_size)  # each test image is evaluated by one worker
            self.test_images, self.test_labels = test_images[part], test_labels[part]
            self.count = len(self.images)
            self.ids = torch.arange(self.count)
            self.order = GlobalOrder(self.count, args.batch_size, job.rank, job.world_size, args.seed, job.device)


def evaluate(job: Job, net: nn.Module, images: Tensor, labels: Tensor) -> tuple[float, float]:
    """Mean loss and accuracy over the test images of all workers."""
    net.eval()
    dtype = next(net.parameters()).dtype
    total = torch.tensor([0, 0, len(images)], dtype=torch.float64, device=images.device)
    loss, right, _ = total.unbind()
    with torch.no_grad():
        for x, y in zip(images.split(500), labels.split(500)):
            output = net(data.normalised(x, dtype))
            loss += F.cross_entropy(output, y, reduction="sum")
            right += (output.argmax(1) == y).sum()
    all_loss, all_right, count = job.sum(total).tolist()
    return all_loss / count, all_right / count


def optimizer_of(args: argparse.Namespace, net: nn.Module) -> torch.optim.Optimizer:
    """Create the optimizer selected on the command line."""
    lr = {"adadelta": 2.0, "sgd": 0.05, "adamw": 0.001}[args.optimizer] if args.lr is None else args.lr
    if args.optimizer == "sgd":
        return torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    kind = torch.optim.Adadelta if args.optimizer == "adadelta" else torch.optim.AdamW
    return kind(net.parameters(), lr=lr)


def scheduler_of(args: argparse.Namespace, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Create the learning rate schedule, stepped once per epoch."""
    if args.schedule == "cosine":
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=args.gamma if args.schedule == "step" else 1.0)


def parts(x: Tensor, y: Tensor, count: int) -> Iterator[tuple[Tensor, Tensor, bool]]:
    """Split a worker's share of a batch into `count` parts of about equal size; yield each, and whether it is last."""
    for i, (part_x, part_y) in enumerate(zip(x.tensor_split(count), y.tensor_split(count)), 1):
        yield part_x, part_y, i == count


def half_of(amp: str | None, device: torch.device) -> torch.dtype:
    """The dtype of mixed precision. Only float16 needs a GradScaler, since small gradients underflow in it."""
    auto = torch.float16 if device.type == "cuda" else torch.bfloat16
    return {"float16": torch.float16, "bfloat16": torch.bfloat16}.get(amp or "auto", auto)


def random_state(job: Job) -> Tensor:
    """The state of this worker's random number generator, of the GPU or the CPU: (N,) uint8."""
    return torch.cuda.get_rng_state(job.device) if job.device.type == "cuda" else torch.get_rng_state()


def restore(state: dict[str, Any], job: Job, args: argparse.Namespace, holders: dict[str, Any]) -> tuple[int, int]:
    """Restore a checkpoint; return the epoch and the step in it. Raises SystemExit if the arguments do not match."""
    for name in FIXED:
        if state["arguments"][name] != getattr(args, name):
            was, now, flag = state["arguments"][name], getattr(args, name), name.replace("_", "-")
            raise SystemExit(f"error: the checkpoint was made with --{flag} {was}, not {now}\nhint: use --{flag} {was}")
    for name, holder in holders.items():
        if state[name]:  # a run without float16 has saved no scaler
            holder.load_state_dict(state[name])
    same_kind = state["random"][0].shape == random_state(job).shape  # the generators of GPU and CPU differ
    if same_kind and len(state["random"]) == job.world_size:  # not restored with a different number of workers
        mine = state["random"][job.rank]
        torch.cuda.set_rng_state(mine, job.device) if job.device.type == "cuda" else torch.set_rng_state(mine)
    return state["epoch"], state["epoch_step"]


def read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read the checkpoint in a folder; raises SystemExit if it is missing, damaged or contains more than data."""
    try:
        return load(path)
    except (OSError, ValueError, KeyError, pickle.UnpicklingError) as error:
        raise SystemExit(f"error: {path} is not a valid checkpoint: {str(error).splitlines()[0]}") from None


def newest(job: Job, checkpoints: Checkpoints) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Read rank 0's newest valid checkpoint on all workers; raises SystemExit on a worker that cannot."""
    found = checkpoints.newest() if job.rank == 0 else None
    step = job.broadcast([torch.tensor([found[1]["step"] if found else -1])], [(1, torch.int64)])[0].item()
    return found if job.rank == 0 or step < 0 else read(checkpoints.path(int(step)))


def transfer(net: nn.Module, path: Path, say: Any) -> None:
    """Load the weights in a checkpoint folder or a .safetensors file, and list tensors that do not match."""
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        try:
            weights = load_file(path)
        except Exception as error:  # safetensors raises its own exceptions besides OSError
            raise SystemExit(f"error: cannot read {path}: {error}") from None
    else:
        weights = read(path)[0]["model"]
    own = net.state_dict()
    matching = {name: value for name, value in weights.items() if name in own and own[name].shape == value.shape}
    missing, unexpected = sorted(own.keys() - matching.keys()), sorted(weights.keys() - matching.keys())
    net.load_state_dict(matching, strict=False)
    say(f"loaded {len(matching)} of {len(own)} tensors from {path}")
    say(f"  missing, trained from scratch: {', '.join(missing) or 'none'}")
    say(f"  unexpected, ignored: {', '.join(unexpected) or 'none'}")


class Trainer:
    """One worker's part of training: build, train step by step, evaluate, save, close."""

    def __init__(self, args: argparse.Namespace) -> None:
        """Build everything, and resume from a checkpoint if `--resume` finds one."""
        self.args, self.job = args, Job()
        print(f"rank {self.job.rank} of {self.job.world_size} on {self.job.device}", flush=True)
        self.samples = Samples(self.job, args)
        self.dtype = getattr(torch, args.dtype)
        self.net = self._net()
        self.optimizer = optimizer_of(args, self.net)
        self.scheduler = scheduler_of(args, self.optimizer)
        self.mixed, self.half = args.amp is not None, half_of(args.amp, self.job.device)
        scaled = self.mixed and self.half == torch.float16
        self.scaler = torch.amp.GradScaler(self.job.device.type, enabled=scaled)
        torch.manual_seed(args.seed + self.job.rank)  # dropout differs between workers, initial weights do not
        self.checkpoints = Checkpoints(self.job.folder / "checkpoints", args.keep, self.job.over)
        self.first_epoch, self.first_step = self._resume()
        self.strategy = strategy.Strategy(args.strategy, self.job, self.net)
        self.strategy.settle(data.normalised(self.samples.images[:1], self.dtype), self.samples.labels[:1])
        network = self.strategy.model
        self.network = torch.compile(network, mode=args.compile) if args.compile else network
        self.losses: list[tuple[int, int, Tensor]] = []  # not yet reported: epoch, step, this worker's part of the loss
        self.own_work = Stopwatch(self.job.device, time.perf_counter)  # excludes waiting for other workers

    def _net(self) -> nn.Module:
        args = self.args
        torch.manual_seed(args.seed)
        _, channels, side, _ = self.samples.images.shape
        net = model.build(args.model, channels, side, args.dropout).to(self.job.device, self.dtype)
        if args.init_from:
            transfer(net, args.init_from, self.job.say)
        return net

    def _holders(self) -> dict[str, Any]:
        """The objects whose state a checkpoint contains."""
        return {"model": self.net, "optimizer": self.optimizer, "scheduler": self.scheduler, "scaler": self.scaler}

    def _resume(self) -> tuple[int, int]:
        """Resume if requested; return the first epoch, and the number of its steps that are done."""
        if self.args.resume == "none":
            return 1, 0
        auto = self.args.resume == "auto"
        found = newest(self.job, self.checkpoints) if auto else read(Path(self.args.resume))
        if not found:
            return 1, 0
        epoch, epoch_step = restore(found[0], self.job, self.args, self._holders())
        self.job.say(f"resumed after step {found[1]['step']}, in epoch {epoch}")
        return epoch, epoch_step

    def train(self) -> None:
        """Train to the end of the last epoch, and close; exits the process early if a worker got SIGTERM."""
        for epoch in range(self.first_epoch, self.args.epochs + 1):
            started = time.monotonic()
            asked = self.train_epoch(epoch)
            step = epoch * self.samples.order.steps
            self.save(step, epoch + 1, 0, score=self.evaluate_epoch(epoch, step, started))
            if asked and epoch < self.args.epochs:
                self.stop(step)
        if self.args.check_replicas:
            replicas.check(self.job, self.net, self.args.epochs * self.samples.order.steps)
        self.checkpoints.wait()
        self.job.close()

    def train_epoch(self, epoch: int) -> bool:
        """Take the remaining steps of an epoch; returns whether a worker was asked to stop."""
        args, order = self.args, self.samples.order
        self.network.train()
        for epoch_step, (mine, total) in enumerate(order.batches(epoch, self.first_step), self.first_step + 1):
            step = (epoch - 1) * order.steps + epoch_step
            self.losses.append((epoch, step, self.train_step(step, mine, total)))
            asked = step % REPORT_EVERY == 0 and self.report()
            if args.check_replicas and step % args.check_replicas == 0:
                replicas.check(self.job, self.net, step)
            within = epoch_step < order.steps
            if within and (asked or (args.save_every and step % args.save_every == 0)):
                asked = self.report() or asked
                self.job.asked |= asked  # a SIGTERM since then is handled at the next step
                self.save(step, epoch, epoch_step)
                if asked:
                    self.stop(step)
        self.first_step = 0
        asked = self.report()
        self.scheduler.step()
        self.strategy.share_buffers()
        return asked

    def train_step(self, step: int, mine: Tensor, total: int) -> Tensor:
        """Take one step on the samples with the indices `mine`, (N,) int64, out of `total` in the global batch.

        Returns this worker's part of the loss, which is the mean over the global batch: a scalar.
        """
        args, job, images, labels = self.args, self.job, self.samples.images, self.samples.labels
        self.own_work.start()
        if args.ledger:
            entry = {"generation": job.generation, "step": step, "samples": self.samples.ids[mine.cpu()].tolist()}
            append(job.folder / f"ledger-{job.rank}.jsonl", [json.dumps(entry)])
        self.optimizer.zero_grad()
        if args.compile:
            torch.compiler.cudagraph_mark_step_begin()  # results of the previous step may be overwritten
        loss = torch.zeros((), dtype=self.dtype, device=job.device)
        for x, y, last in parts(images[mine], labels[mine], args.accumulate):
            idle = len(x) == 0  # no samples for this worker, but its peers wait for its gradients
            self.network.train(not idle)  # keeps the placeholder sample out of batch norm statistics
            x, y = (images[:1], labels[:1]) if idle else (x, y)
            x = data.normalised(data.augmented(x) if args.augment else x, self.dtype)
            with self.strategy.accumulating(last), torch.autocast(job.device.type, self.half, enabled=self.mixed):
                # The mean over the global batch: gradients are averaged over workers, whose shares may differ.
                part = F.cross_entropy(self.network(x), y, reduction="sum") * (0 if idle else 1 / total)
                self.own_work.stop()  # the backward pass waits for the other workers
                self.scaler.scale(part * job.world_size).backward()
            self.own_work.start()
            loss += part.detach()
        self.strategy.average()
        if args.skew_rank == job.rank:
            for parameter in self.net.parameters():
                parameter.grad = parameter.grad * 1.01 if parameter.grad is not None else None
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss

    def report(self) -> bool:
        """Record the losses; returns whether a worker was asked to stop, on all workers at the same step."""
        job, losses = self.job, self.losses
        more = torch.zeros(1 + job.world_size, dtype=self.dtype)
        more[0], more[1 + job.rank] = float(job.asked), self.own_work.read() / max(1, len(losses))
        sums = job.sum(torch.cat([*(loss.reshape(1) for _, _, loss in losses), more.to(job.device)])).tolist()
        asking, *seconds = sums[len(losses) :]
        for (epoch, step, _), value in zip(losses, sums):
            if not math.isfinite(value):  # before broken weights are saved
                raise SystemExit(f"error: the loss is {value} at step {step}\nhint: try a lower --lr")
            job.record(kind="step", epoch=epoch, step=step, loss=value)
        if losses:
            total = self.args.epochs * self.samples.order.steps
            job.record(kind="pace", step=losses[-1][1], total_steps=total, rank_seconds=seconds)
        losses.clear()
        return asking > 0

    def evaluate_epoch(self, epoch: int, step: int, started: float) -> float:
        """Record and return the accuracy after an epoch that ended with `step`; `started` is its start time."""
        samples = self.samples
        test_loss, accuracy = evaluate(self.job, self.net, samples.test_images, samples.test_labels)
        seconds = time.monotonic() - started
        facts = {"test_loss": test_loss, "test_accuracy": accuracy, "seconds": seconds, "samples": samples.count}
        self.job.record(kind="epoch", epoch=epoch, step=step, **facts)
        summary = f"accuracy {accuracy:.2%}, loss {test_loss:.4f}, {seconds:.1f} s"
        self.job.say(f"epoch {epoch}/{self.args.epochs}: {summary}")
        return accuracy

    def save(self, step: int, next_epoch: int, epoch_step: int, score: float | None = None) -> None:
        """Save a checkpoint of all workers after `step`; training resumes at `next_epoch` and `epoch_step`."""
        job, started = self.job, time.monotonic()
        state = {name: holder.state_dict() for name, holder in self._holders().items()}
        arguments = {name: getattr(self.args, name) for name in FIXED}
        state |= {"epoch": next_epoch, "epoch_step": epoch_step, "random": job.gather(random_state(job))}
        if job.rank == 0:
            if score is not None or job.asked:
                self.checkpoints.wait()  # saves at the end of an epoch or on SIGTERM must not be skipped
            facts = {"score": score, "world_size": job.world_size, "generation": job.generation}
            self.checkpoints.save(state | {"arguments": arguments}, step, **facts)
        job.record(kind="save", step=step, save_seconds=time.monotonic() - started)

    def stop(self, step: int) -> None:
        """Exit this process after `step`; all workers exit after the same step."""
        self.checkpoints.wait()
        self.job.say(f"stopped by SIGTERM: saved at step {step}")
        self.job.close()
        leave(STOPPED)


def train(args: argparse.Namespace) -> None:
    """Train in this process."""
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
        torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(True)
    Trainer(args).train()


def main() -> None:
    """Train in this process or in spawned workers."""
    args = arguments()
    spawn(args.spawn, train, args) if args.spawn else train(args)


if __name__ == "__main__":
    main()
    leave()
