"""Who sees which sample when: every sample exactly once an epoch, whatever the number of workers.

torch's DistributedSampler repeats samples where the count does not divide, or drops some, and its global batches
depend on the number of workers. These orders do neither, so that a job can be compared with a single process, and go
on with another number of workers.
"""

from collections.abc import Iterator

import torch
from torch import Tensor


def permutation(count: int, *seeds: int) -> Tensor:
    """The numbers below `count`, shuffled; the same for the same seeds."""
    mixed = 0
    for seed in seeds:
        mixed = (mixed * 1_000_003 + seed) % (1 << 63)
    return torch.randperm(count, generator=torch.Generator().manual_seed(mixed))


class GlobalOrder:
    """Data that every worker has: one order for all, of which each takes its part of every global batch."""

    def __init__(
        self, count: int, batch: int, rank: int, world_size: int, seed: int, device: torch.device | str = "cpu"
    ) -> None:
        self.count, self.batch, self.rank, self.world_size, self.seed = count, batch, rank, world_size, seed
        self.device = device  # where the samples are: an order on the CPU would be copied there at each step
        self.steps = -(-count // batch)

    def batches(self, epoch: int, first: int = 0) -> Iterator[tuple[Tensor, int]]:
        """From step `first`: this worker's samples (perhaps none), and how many all workers have together."""
        order = permutation(self.count, self.seed, epoch).to(self.device)
        for part in order[first * self.batch :].split(self.batch):
            if len(part):
                yield part[self.rank :: self.world_size], len(part)


class ShardOrder:
    """Data of which each worker has its own part, `counts[rank]` samples; one that has run out takes part idly."""

    def __init__(self, counts: list[int], batch: int, rank: int, seed: int, device: torch.device | str = "cpu") -> None:
        self.counts, self.rank, self.seed, self.device = counts, rank, seed, device
        self.share = max(1, batch // len(counts))
        self.steps = -(-max(counts) // self.share)

    def batches(self, epoch: int, first: int = 0) -> Iterator[tuple[Tensor, int]]:
        """As above; the samples are numbers into this worker's own part."""
        order = permutation(self.counts[self.rank], self.seed, epoch, self.rank).to(self.device)
        for step in range(first, self.steps):
            start, end = step * self.share, (step + 1) * self.share
            yield order[start:end], sum(min(end, count) - min(start, count) for count in self.counts)
