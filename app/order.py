"""The order of samples: every sample exactly once per epoch, for any number of workers.

torch's DistributedSampler repeats or drops samples if their count is not divisible by the number of workers, and its
global batches depend on that number. These orders do neither, so a job is comparable with a single process, and can
continue with a different number of workers.
"""

from collections.abc import Iterator

import torch
from torch import Tensor


def permutation(count: int, *seeds: int) -> Tensor:
    """The numbers below `count`, shuffled, deterministic by seeds."""
    mixed = 0
    for seed in seeds:
        mixed = (mixed * 1_000_003 + seed) % (1 << 63)
    return torch.randperm(count, generator=torch.Generator().manual_seed(mixed))


class GlobalOrder:
    """For data that every worker has in full: one global order, with each worker taking its share of every batch."""

    def __init__(
        self, count: int, batch: int, rank: int, world_size: int, seed: int, device: torch.device | str = "cpu"
    ) -> None:
        self.count, self.batch, self.rank, self.world_size, self.seed = count, batch, rank, world_size, seed
        self.device = device  # that of the samples: an order on the CPU would be copied there at each step
        self.steps = -(-count // batch)

    def batches(self, epoch: int, first: int = 0) -> Iterator[tuple[Tensor, int]]:
        """Yield from step `first` on: this worker's samples (possibly none), and the size of the global batch."""
        order = permutation(self.count, self.seed, epoch).to(self.device)
        for part in order[first * self.batch :].split(self.batch):
            if len(part):
                yield part[self.rank :: self.world_size], len(part)


class ShardOrder:
    """For sharded data, with `counts[rank]` samples per worker; a worker that has run out gets empty batches."""

    def __init__(self, counts: list[int], batch: int, rank: int, seed: int, device: torch.device | str = "cpu") -> None:
        self.counts, self.rank, self.seed, self.device = counts, rank, seed, device
        self.share = max(1, batch // len(counts))
        self.steps = -(-max(counts) // self.share)

    def batches(self, epoch: int, first: int = 0) -> Iterator[tuple[Tensor, int]]:
        """Yield as `GlobalOrder.batches` does; samples are indices into this worker's own shards."""
        order = permutation(self.counts[self.rank], self.seed, epoch, self.rank).to(self.device)
        for step in range(first, self.steps):
            start, end = step * self.share, (step + 1) * self.share
            yield order[start:end], sum(min(end, count) - min(start, count) for count in self.counts)
