"""Four ways to train one model. They differ in what happens to the gradients, and in nothing else.

`single`  one process.
`manual`  one process per device; after `backward()` every gradient is averaged over the workers by hand.
`ddp`     the same by DistributedDataParallel, which averages in buckets while `backward()` still runs.
`dp`      one process; DataParallel splits each batch over the devices that it sees. On the CPU it does nothing.
"""

import contextlib
from contextlib import AbstractContextManager

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DataParallel, DistributedDataParallel

from app.job import Job

NAMES = ("single", "manual", "dp", "ddp")


class Strategy:
    """`model` is what the loop calls; `net` is the bare module whose weights are trained and saved."""

    def __init__(self, name: str, job: Job, net: nn.Module) -> None:
        if job.world_size > 1 and name in ("single", "dp"):
            hint = "take one worker (--trainers 0), or --strategy ddp or manual"
            raise SystemExit(f"error: --strategy {name} is one process, not {job.world_size}\nhint: {hint}")
        self.name, self.job, self.net, self.model = name, job, net, net
        if name == "dp" and job.device.type == "cuda":
            self.model = DataParallel(net)
        elif name == "dp":
            job.say("dp: DataParallel splits batches over GPUs; on the CPU it passes them on as they are")
        elif job.world_size > 1 and name == "ddp":
            self.model = DistributedDataParallel(net)
        elif job.world_size > 1:
            for tensor in net.state_dict().values():  # all begin with rank 0's weights, as DDP sees to by itself
                dist.broadcast(tensor, src=0)

    def settle(self, x: Tensor, y: Tensor) -> None:
        """Have DDP see one backward pass, after which it arranges its buckets anew, once.

        The place of a gradient in its bucket decides the order in which the workers' parts are added, and with more
        than two workers the last bit of the sum. Without this the first step after a resume would differ from the
        same step of a run that was not interrupted. Weights, buffers and random numbers stay as they are.
        """
        if isinstance(self.model, DistributedDataParallel):
            self.net.eval()
            F.cross_entropy(self.model(x), y).backward()
            self.net.zero_grad()
            self.net.train()

    def accumulating(self, last: bool) -> AbstractContextManager[None]:
        """Around the forward and backward pass of a part of a batch; gradients travel with the last part alone."""
        if isinstance(self.model, DistributedDataParallel) and not last:
            return self.model.no_sync()
        return contextlib.nullcontext()

    def average(self) -> None:
        """After `backward()`: make every gradient the mean over all workers, where nothing else has."""
        if self.name == "manual" and self.job.world_size > 1:
            for parameter in self.net.parameters():
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= self.job.world_size

    def share_buffers(self) -> None:
        """Give all workers rank 0's buffers (batch norm's running statistics), for evaluation."""
        if self.job.world_size > 1:
            for buffer in self.net.buffers():
                dist.broadcast(buffer, src=0)
