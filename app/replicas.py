"""Check that all replicas have equal parameters: replicas that diverge raise no error, but train badly."""

import hashlib

import torch
from torch import nn

from app.job import Job


def digest(net: nn.Module) -> torch.Tensor:
    """SHA-256 of all parameters: (32,) uint8."""
    total = hashlib.sha256()
    for parameter in net.parameters():
        total.update(parameter.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return torch.tensor(list(total.digest()), dtype=torch.uint8)


def check(job: Job, net: nn.Module, step: int) -> None:
    """Compare the parameters of all workers; if they differ, raise SystemExit on all, naming the minority."""
    hashes = [bytes(part.tolist()).hex()[:8] for part in job.gather(digest(net))]
    majority = max(hashes, key=lambda value: (hashes.count(value), value == hashes[0]))
    odd = [f"rank {rank} ({value})" for rank, value in enumerate(hashes) if value != majority]
    if odd:
        same = len(hashes) - len(odd)
        raise SystemExit(f"error: replicas differ at step {step}: {', '.join(odd)}; the other {same} have {majority}")
