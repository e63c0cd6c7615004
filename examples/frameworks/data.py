"""The data and model that all scripts in this folder train: random numbers, so nothing is downloaded."""

import hashlib

import torch
from torch import nn
from torch.utils.data import TensorDataset


def dataset(samples: int = 512) -> TensorDataset:
    """Return `samples` pairs of 16 features and their sum."""
    features = torch.randn(samples, 16, generator=torch.Generator().manual_seed(0))
    return TensorDataset(features, features.sum(1, keepdim=True))


def model() -> nn.Module:
    """Return a small network; its weights differ between ranks unless they are synchronised."""
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))


def digest(state: dict[str, torch.Tensor]) -> str:
    """Return a short hash of weights: equal on all ranks if they trained one model."""
    data = b"".join(state[name].detach().cpu().contiguous().numpy().tobytes() for name in sorted(state))
    return hashlib.sha256(data).hexdigest()[:12]
