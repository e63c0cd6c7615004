"""Four ways to train one model. They differ only in how they handle gradients.

`single`  one process.
`manual`  one process per device; after `backward()`, every gradient is averaged explicitly over the workers.
`ddp`     the same with DistributedDataParallel, which averages in buckets while `backward()` is still running.
`dp`      one process; DataParallel splits each batch over the visible devices. On the CPU it has no effect.
"""

import contextlib
from contextlib import AbstractContextManager

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DataParallel, DistributedDataParallel

from app.job import Job

NAMES = ("single", "dp", "manual", "ddp")


class Strategy:
    """The training loop calls `model`; `net` is the bare module whose weights are trained and saved."""

    def __init__(self, name: str, job: Job, net: nn.Module) -> None:
        if job.world_size > 1 and name in ("single", "dp"):
            hint = "use one worker (--trainers 0), or --strategy ddp or manual"
            raise SystemExit(f"error: --strategy {name} runs in one process, not {job.world_size}\nhint: {hint}")
        self.name, self.job, self.net, self.model = name, job, net, net
        if name == "dp" and job.device.type == "cuda":
            self.model = DataParallel(net)
        elif name == "dp":
            job.say("dp: DataParallel splits batches over GPUs; on the CPU it has no effect")
        elif job.world_size > 1 and name == "ddp":
            self.model = DistributedDataParallel(net)
        elif job.world_size > 1:
            for tensor in net.state_dict().values():  # all start with rank 0's weights, as with DDP
                dist.broadcast(tensor, src=0)

    def settle(self, x: Tensor, y: Tensor) -> None:
        """Run one backward pass, after which DDP rebuilds its buckets, once.

        The position of a gradient in its bucket determines the order in which the workers' values are added, and with
        more than two workers the last bit of the sum. Without this, the first step after a resume would differ from
        the same step of an uninterrupted run. Weights, buffers and random state are unchanged.
        """
        if isinstance(self.model, DistributedDataParallel):
            self.net.eval()
            F.cross_entropy(self.model(x), y).backward()
            self.net.zero_grad()
            self.net.train()

    def accumulating(self, last: bool) -> AbstractContextManager[None]:
        """Context for the forward and backward pass of a part of a batch; only the last part exchanges gradients."""
        if isinstance(self.model, DistributedDataParallel) and not last:
            return self.model.no_sync()
        return contextlib.nullcontext()

    def average(self) -> None:
        """Average every gradient over all workers after `backward()`, for `manual`; DDP already does."""
        if self.name == "manual" and self.job.world_size > 1:
            for parameter in self.net.parameters():
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= self.job.world_size

    def share_buffers(self) -> None:
        """Broadcast rank 0's buffers (batch norm's running statistics) to all workers, for evaluation."""
        if self.job.world_size > 1:
            for buffer in self.net.buffers():
                dist.broadcast(buffer, src=0)
