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
    for name in ("batch_size", "seed", "dataset", "model", "optimizer"):
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


def train(args: argparse.Namespace) -> None:
    """Build, train, close."""
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
        torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(True)
    job = Job()
    print(f"rank {job.rank} of {job.world_size} on {job.device}", flush=True)
    samples = Samples(job, args)
    dtype = getattr(torch, args.dtype)

    torch.manual_seed(args.seed)
    _, channels, side, _ = samples.images.shape
    net = model.build(args.model, channels, side, args.dropout).to(job.device, dtype)
    if args.init_from:
        transfer(net, args.init_from, job.say)
    optimizer = optimizer_of(args, net)
    scheduler = scheduler_of(args, optimizer)
    mixed, half = args.amp is not None, half_of(args.amp, job.device)
    scaler = torch.amp.GradScaler(job.device.type, enabled=mixed and half == torch.float16)
    holders = {"model": net, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
    torch.manual_seed(args.seed + job.rank)  # dropout differs between workers; the weights do not

    checkpoints = Checkpoints(job.folder / "checkpoints", args.keep, job.over)
    start, first = 1, 0
    if args.resume != "none":
        found = newest(job, checkpoints) if args.resume == "auto" else read(Path(args.resume))
        if found:
            start, first = restore(found[0], job, args, holders)
            job.say(f"resumed after step {found[1]['step']}, in epoch {start}")

    way = strategy.Strategy(args.strategy, job, net)
    way.settle(data.normalised(samples.images[:1], dtype), samples.labels[:1])
    network = torch.compile(way.model, mode=args.compile) if args.compile else way.model
    ledger = job.folder / f"ledger-{job.rank}.jsonl"
    losses: list[tuple[int, int, Tensor]] = []  # epoch, step, this worker's part of the loss
    own = Stopwatch(job.device, time.perf_counter)  # of work in which this worker waits for no other

    def show() -> bool:
        """Record the losses; True where a worker was asked to end, which all workers learn at the same step."""
        more = torch.zeros(1 + job.world_size, dtype=dtype)
        more[0], more[1 + job.rank] = float(job.asked), own.read() / max(1, len(losses))
        sums = job.sum(torch.cat([*(loss.reshape(1) for _, _, loss in losses), more.to(job.device)])).tolist()
        asking, *seconds = sums[len(losses) :]
        if losses:
            job.record(kind="pace", step=losses[-1][1], rank_seconds=seconds)
        for (at_epoch, at_step, _), value in zip(losses, sums):
            if not math.isfinite(value):  # before weights that are lost are saved
                raise SystemExit(f"error: the loss is {value} at step {at_step}\nhint: a lower --lr")
            job.record(kind="step", epoch=at_epoch, step=at_step, loss=value)
        losses.clear()
        return asking > 0

    def stop(step: int) -> None:
        checkpoints.wait()
        job.say(f"asked to end: saved at step {step}")
        job.close()
        leave(STOPPED)

    def save(step: int, next_epoch: int, epoch_step: int, score: float | None = None) -> None:
        state = {name: holder.state_dict() for name, holder in holders.items()}
        arguments = {name: getattr(args, name) for name in ("batch_size", "seed", "dataset", "model", "optimizer")}
        state |= {"epoch": next_epoch, "epoch_step": epoch_step, "random": job.gather(random_state(job))}
        if job.rank == 0:
            if score is not None or job.asked:
                checkpoints.wait()  # the end of an epoch is worth waiting for; a save between may be left out
            facts = {"score": score, "world_size": job.world_size, "generation": job.generation}
            checkpoints.save(state | {"arguments": arguments}, step, **facts)

    for epoch in range(start, args.epochs + 1):
        started = time.monotonic()
        network.train()
        for epoch_step, (mine, total) in enumerate(samples.order.batches(epoch, first), first + 1):
            step = (epoch - 1) * samples.order.steps + epoch_step
            own.start()
            if args.ledger:
                entry = {"generation": job.generation, "step": step, "samples": samples.ids[mine.cpu()].tolist()}
                append(ledger, [json.dumps(entry)])
            optimizer.zero_grad()
            if args.compile:
                torch.compiler.cudagraph_mark_step_begin()  # the results of the step before may be overwritten
            loss = torch.zeros((), dtype=dtype, device=job.device)
            for x, y, last in parts(samples.images[mine], samples.labels[mine], args.accumulate):
                idle = len(x) == 0  # this worker has nothing to add, but its peers wait for its gradients
                network.train(not idle)  # nor must a sample that does not count be learnt by a batch norm
                x, y = (samples.images[:1], samples.labels[:1]) if idle else (x, y)
                x = data.normalised(data.augmented(x) if args.augment else x, dtype)
                with way.accumulating(last), torch.autocast(job.device.type, half, enabled=mixed):
                    # The mean over the global batch: gradients are averaged over workers, whose shares may differ.
                    part = F.cross_entropy(network(x), y, reduction="sum") * (0 if idle else 1 / total)
                    own.stop()  # the backward pass waits for the other workers
                    scaler.scale(part * job.world_size).backward()
                own.start()
                loss += part.detach()
            way.average()
            if args.skew_rank == job.rank:
                for parameter in net.parameters():
                    parameter.grad = parameter.grad * 1.01 if parameter.grad is not None else None
            scaler.step(optimizer)
            scaler.update()
            losses.append((epoch, step, loss))
            asked = step % SHOWN == 0 and show()
            if args.check_replicas and step % args.check_replicas == 0:
                replicas.check(job, net, step)
            within = epoch_step < samples.order.steps
            if within and (asked or (args.save_every and step % args.save_every == 0)):
                asked = show() or asked
                job.asked |= asked  # a SIGTERM that has come since is heard at the next step
                save(step, epoch, epoch_step)
                if asked:
                    stop(step)
        asked = show()
        first = 0
        scheduler.step()
        way.share_buffers()
        test_loss, accuracy = evaluate(job, net, samples.test_images, samples.test_labels)
        seconds = time.monotonic() - started
        step = epoch * samples.order.steps
        facts = {"test_loss": test_loss, "test_accuracy": accuracy, "seconds": seconds, "samples": samples.count}
        job.record(kind="epoch", epoch=epoch, step=step, **facts)
        job.say(f"epoch {epoch}/{args.epochs}: accuracy {accuracy:.2%}, loss {test_loss:.4f}, {seconds:.1f} s")
        save(step, epoch + 1, 0, score=accuracy)
        if asked and epoch < args.epochs:
            stop(step)

    if args.check_replicas:
        replicas.check(job, net, args.epochs * samples.order.steps)
    checkpoints.wait()
    job.close()


def main() -> None:
    """Train, in this process or in workers of its own."""
    args = arguments()
    spawn(args.spawn, train, args) if args.spawn else train(args)


if __name__ == "__main__":
    main()
    leave()
