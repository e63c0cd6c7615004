"""Train a model on however many workers the environment names, in one of four ways.

    python -m orchestrate run                                        four nodes
    python -m orchestrate run -- -m app.train --strategy manual      the same with arguments
    torchrun --nproc-per-node 2 -m app.train                         under torchrun
    python -m app.train --spawn 2                                    by torch.multiprocessing, on this machine
    python -m app.train --strategy single                            one process

It reads torchrun's variables (`RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `MASTER_ADDR`, `MASTER_PORT`) and writes to
`$JOB_DIR` (else `runs/app`): `metrics.jsonl` and `checkpoints/`. After SIGTERM all workers save at one step, and end.
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

SAME = ("batch_size", "seed", "dataset", "model", "optimizer")  # arguments that a checkpoint is bound to
SHOWN = 10  # steps whose losses are summed over all workers at once, and after which all agree whether to stop


def arguments() -> argparse.Namespace:
    """The command line; the defaults of the optimizer follow the PyTorch examples' MNIST script."""
    parser = argparse.ArgumentParser(prog="python -m app.train", description="Train on every worker.")
    add = parser.add_argument
    add("--strategy", choices=strategy.NAMES, default="ddp", help="ddp with one worker is a single process")
    add("--spawn", type=int, metavar="N", help="start N workers on this machine")
    add("--model", choices=model.NAMES, default="lenet")
    add("--dataset", default="digits", metavar="NAME|shards:DIR", help=f"{', '.join(data.NAMES)}, or shards of one")
    add("--data", type=Path, default=data.HOME, metavar="DIR", help="folder of the data set")
    add("--download", action="store_true", help="get the data set from the network if it is not in DIR")
    add("--augment", action="store_true", help="move images at random, mirror colour ones")
    add("--epochs", type=int, default=3)
    add("--batch-size", type=int, default=64, help="of all workers together")
    add("--accumulate", type=int, default=1, metavar="K", help="take each batch in K parts, to save memory")
    add("--optimizer", choices=["adadelta", "sgd", "adamw"], default="adadelta")
    add("--lr", type=float, help="default: 1.0 for adadelta, 0.05 for sgd, 0.001 for adamw")
    add("--schedule", choices=["step", "cosine", "none"], default="step", help="step: times --gamma each epoch")
    add("--gamma", type=float, default=0.7)
    add("--dropout", type=float, default=1.0, help="factor on the model's dropout rates")
    add("--dtype", choices=["float32", "float64"], default="float32")
    half = ["auto", "float16", "bfloat16"]
    add("--amp", nargs="?", const="auto", choices=half, help="mixed precision; auto: float16 on GPUs, bfloat16 on CPUs")
    modes = ["default", "reduce-overhead", "max-autotune"]
    add("--compile", nargs="?", const="default", choices=modes, help="torch.compile; reduce-overhead: CUDA graphs")
    add("--deterministic", action="store_true", help="bit-identical runs on GPUs, too, with slower kernels")
    add("--seed", type=int, default=1)
    add("--save-every", type=int, default=0, metavar="STEPS", help="save between the ends of epochs, too")
    add("--keep", type=int, default=2, help="newest checkpoints to keep, besides the best")
    add("--resume", default="none", metavar="auto|none|DIR", help="auto: the job's newest; DIR: one checkpoint")
    add("--init-from", type=Path, metavar="DIR", help="begin with the weights of a checkpoint, as far as they fit")
    add("--check-replicas", type=int, default=0, metavar="STEPS", help="compare all workers' parameters that often")
    add("--ledger", action="store_true", help="write each worker's samples to ledger-RANK.jsonl")
    add("--skew-rank", type=int, help="spoil this rank's gradients, to see --check-replicas find it")
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
            part = slice(job.rank, None, job.world_size)  # each test image is looked at by one worker
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
    """The optimizer that the command line names."""
    lr = {"adadelta": 1.0, "sgd": 0.05, "adamw": 0.001}[args.optimizer] if args.lr is None else args.lr
    if args.optimizer == "sgd":
        return torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    kind = torch.optim.Adadelta if args.optimizer == "adadelta" else torch.optim.AdamW
    return kind(net.parameters(), lr=lr)


def scheduler_of(args: argparse.Namespace, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """The learning rate per epoch."""
    if args.schedule == "cosine":
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=args.gamma if args.schedule == "step" else 1.0)


def parts(x: Tensor, y: Tensor, count: int) -> Iterator[tuple[Tensor, Tensor, bool]]:
    """A worker's share of a batch in `count` parts of about equal size, with whether it is the last."""
    for i, (part_x, part_y) in enumerate(zip(x.tensor_split(count), y.tensor_split(count)), 1):
        yield part_x, part_y, i == count


def half_of(amp: str | None, device: torch.device) -> torch.dtype:
    """The type of mixed precision; float16 alone needs a GradScaler, since small gradients vanish in it."""
    auto = torch.float16 if device.type == "cuda" else torch.bfloat16
    return {"float16": torch.float16, "bfloat16": torch.bfloat16}.get(amp or "auto", auto)


def random_state(job: Job) -> Tensor:
    """The state of this worker's generator, of the GPU or the CPU: (N,) uint8."""
    return torch.cuda.get_rng_state(job.device) if job.device.type == "cuda" else torch.get_rng_state()


def restore(state: dict[str, Any], job: Job, args: argparse.Namespace, holders: dict[str, Any]) -> tuple[int, int]:
    """Put a checkpoint's content back; return epoch and step within it. Raises SystemExit where it does not fit."""
    for name in SAME:
        if state["arguments"][name] != getattr(args, name):
            was, now, flag = state["arguments"][name], getattr(args, name), name.replace("_", "-")
            raise SystemExit(f"error: the checkpoint was made with --{flag} {was}, not {now}\nhint: --{flag} {was}")
    for name, holder in holders.items():
        if state[name]:  # a run without float16 saved no scaler
            holder.load_state_dict(state[name])
    same_kind = state["random"][0].shape == random_state(job).shape  # the generator of a GPU is not that of the CPU
    if same_kind and len(state["random"]) == job.world_size:  # another number of workers draws other random numbers
        mine = state["random"][job.rank]
        torch.cuda.set_rng_state(mine, job.device) if job.device.type == "cuda" else torch.set_rng_state(mine)
    return state["epoch"], state["epoch_step"]


def read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The checkpoint in a folder; raises SystemExit where it is missing, damaged or more than data."""
    try:
        return load(path)
    except (OSError, ValueError, KeyError, pickle.UnpicklingError) as error:
        raise SystemExit(f"error: {path} is no good checkpoint: {str(error).splitlines()[0]}") from None


def newest(job: Job, checkpoints: Checkpoints) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """The newest good checkpoint as rank 0 sees it, for all workers; one that cannot read that very one ends."""
    found = checkpoints.newest() if job.rank == 0 else None
    step = job.broadcast([torch.tensor([found[1]["step"] if found else -1])], [(1, torch.int64)])[0].item()
    return found if job.rank == 0 or step < 0 else read(checkpoints.path(int(step)))


def transfer(net: nn.Module, path: Path, say: Any) -> None:
    """Begin with the weights in a checkpoint folder, or a .safetensors file, and list what does not fit."""
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        try:
            weights = load_file(path)
        except Exception as error:  # its own kinds of error, besides OSError
            raise SystemExit(f"error: {path} cannot be read: {error}") from None
    else:
        weights = read(path)[0]["model"]
    own = net.state_dict()
    fitting = {name: value for name, value in weights.items() if name in own and own[name].shape == value.shape}
    missing, unexpected = sorted(own.keys() - fitting.keys()), sorted(weights.keys() - fitting.keys())
    net.load_state_dict(fitting, strict=False)
    say(f"{len(fitting)} of {len(own)} tensors from {path}")
    say(f"  missing, trained from scratch: {', '.join(missing) or 'none'}")
    say(f"  unexpected, left out: {', '.join(unexpected) or 'none'}")


class Trainer:
    """One worker's part of a training: build, train step by step, evaluate, save, close."""

    def __init__(self, args: argparse.Namespace) -> None:
        """Build all that is trained, and go on from a checkpoint where there is one."""
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
        torch.manual_seed(args.seed + self.job.rank)  # dropout differs between workers; the weights do not
        self.checkpoints = Checkpoints(self.job.folder / "checkpoints", args.keep, self.job.over)
        self.first_epoch, self.first_step = self._resume()
        self.strategy = strategy.Strategy(args.strategy, self.job, self.net)
        self.strategy.settle(data.normalised(self.samples.images[:1], self.dtype), self.samples.labels[:1])
        network = self.strategy.model
        self.network = torch.compile(network, mode=args.compile) if args.compile else network
        self.losses: list[tuple[int, int, Tensor]] = []  # not yet reported: epoch, step, this worker's part of the loss
        self.own = Stopwatch(self.job.device, time.perf_counter)  # of work in which this worker waits for no other

    def _net(self) -> nn.Module:
        args = self.args
        torch.manual_seed(args.seed)
        _, channels, side, _ = self.samples.images.shape
        net = model.build(args.model, channels, side, args.dropout).to(self.job.device, self.dtype)
        if args.init_from:
            transfer(net, args.init_from, self.job.say)
        return net

    def _holders(self) -> dict[str, Any]:
        """What a checkpoint has the state of."""
        return {"model": self.net, "optimizer": self.optimizer, "scheduler": self.scheduler, "scaler": self.scaler}

    def _resume(self) -> tuple[int, int]:
        """The epoch to begin with, and the steps of it that are done."""
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
        """Train to the end of the last epoch, and close; ends the process where all workers are asked to end."""
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
        """Take the steps of an epoch that are left; True where a worker was asked to end."""
        args, order = self.args, self.samples.order
        self.network.train()
        for epoch_step, (mine, total) in enumerate(order.batches(epoch, self.first_step), self.first_step + 1):
            step = (epoch - 1) * order.steps + epoch_step
            self.losses.append((epoch, step, self.train_step(step, mine, total)))
            asked = step % SHOWN == 0 and self.report()
            if args.check_replicas and step % args.check_replicas == 0:
                replicas.check(self.job, self.net, step)
            within = epoch_step < order.steps
            if within and (asked or (args.save_every and step % args.save_every == 0)):
                asked = self.report() or asked
                self.job.asked |= asked  # a SIGTERM that has come since is heard at the next step
                self.save(step, epoch, epoch_step)
                if asked:
                    self.stop(step)
        self.first_step = 0
        asked = self.report()
        self.scheduler.step()
        self.strategy.share_buffers()
        return asked

    def train_step(self, step: int, mine: Tensor, total: int) -> Tensor:
        """Take one step on the samples with the numbers `mine`, (N,) int64, of the `total` of all workers.

        Returns this worker's part of the loss, the mean over the global batch: a scalar.
        """
        args, job, images, labels = self.args, self.job, self.samples.images, self.samples.labels
        self.own.start()
        if args.ledger:
            entry = {"generation": job.generation, "step": step, "samples": self.samples.ids[mine.cpu()].tolist()}
            append(job.folder / f"ledger-{job.rank}.jsonl", [json.dumps(entry)])
        self.optimizer.zero_grad()
        if args.compile:
            torch.compiler.cudagraph_mark_step_begin()  # the results of the step before may be overwritten
        loss = torch.zeros((), dtype=self.dtype, device=job.device)
        for x, y, last in parts(images[mine], labels[mine], args.accumulate):
            idle = len(x) == 0  # this worker has nothing to add, but its peers wait for its gradients
            self.network.train(not idle)  # nor must a sample that does not count be learnt by a batch norm
            x, y = (images[:1], labels[:1]) if idle else (x, y)
            x = data.normalised(data.augmented(x) if args.augment else x, self.dtype)
            with self.strategy.accumulating(last), torch.autocast(job.device.type, self.half, enabled=self.mixed):
                # The mean over the global batch: gradients are averaged over workers, whose shares may differ.
                part = F.cross_entropy(self.network(x), y, reduction="sum") * (0 if idle else 1 / total)
                self.own.stop()  # the backward pass waits for the other workers
                self.scaler.scale(part * job.world_size).backward()
            self.own.start()
            loss += part.detach()
        self.strategy.average()
        if args.skew_rank == job.rank:
            for parameter in self.net.parameters():
                parameter.grad = parameter.grad * 1.01 if parameter.grad is not None else None
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss

    def report(self) -> bool:
        """Record the losses; True where a worker was asked to end, which all workers learn at the same step."""
        job, losses = self.job, self.losses
        more = torch.zeros(1 + job.world_size, dtype=self.dtype)
        more[0], more[1 + job.rank] = float(job.asked), self.own.read() / max(1, len(losses))
        sums = job.sum(torch.cat([*(loss.reshape(1) for _, _, loss in losses), more.to(job.device)])).tolist()
        asking, *seconds = sums[len(losses) :]
        if losses:
            job.record(kind="pace", step=losses[-1][1], rank_seconds=seconds)
        for (epoch, step, _), value in zip(losses, sums):
            if not math.isfinite(value):  # before weights that are lost are saved
                raise SystemExit(f"error: the loss is {value} at step {step}\nhint: a lower --lr")
            job.record(kind="step", epoch=epoch, step=step, loss=value)
        losses.clear()
        return asking > 0

    def evaluate_epoch(self, epoch: int, step: int, started: float) -> float:
        """Record and return the accuracy at the end of an epoch, after `step`; `started` is when the epoch began."""
        samples = self.samples
        test_loss, accuracy = evaluate(self.job, self.net, samples.test_images, samples.test_labels)
        seconds = time.monotonic() - started
        facts = {"test_loss": test_loss, "test_accuracy": accuracy, "seconds": seconds, "samples": samples.count}
        self.job.record(kind="epoch", epoch=epoch, step=step, **facts)
        found = f"accuracy {accuracy:.2%}, loss {test_loss:.4f}, {seconds:.1f} s"
        self.job.say(f"epoch {epoch}/{self.args.epochs}: {found}")
        return accuracy

    def save(self, step: int, next_epoch: int, epoch_step: int, score: float | None = None) -> None:
        """Save a checkpoint after `step`, of all workers together: where to go on, and how good the model is."""
        job = self.job
        state = {name: holder.state_dict() for name, holder in self._holders().items()}
        arguments = {name: getattr(self.args, name) for name in SAME}
        state |= {"epoch": next_epoch, "epoch_step": epoch_step, "random": job.gather(random_state(job))}
        if job.rank == 0:
            if score is not None or job.asked:
                self.checkpoints.wait()  # the end of an epoch is worth waiting for; a save between may be left out
            facts = {"score": score, "world_size": job.world_size, "generation": job.generation}
            self.checkpoints.save(state | {"arguments": arguments}, step, **facts)

    def stop(self, step: int) -> None:
        """End this process, as all workers do after the same step."""
        self.checkpoints.wait()
        self.job.say(f"asked to end: saved at step {step}")
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
    """Train, in this process or in workers of its own."""
    args = arguments()
    spawn(args.spawn, train, args) if args.spawn else train(args)


if __name__ == "__main__":
    main()
    leave()
