"""Data: digits that are drawn offline, or the MNIST files from a folder. Both are 28×28 grey images in memory."""

import math
import os
from pathlib import Path

import torch
from torch import Tensor

TRAIN, TEST = 12_000, 2_000  # images of the generated set
VERSION = 1  # of the drawing below: a cached set of another version is not read

# Each digit as one stroke of the pen: points in a unit square, x to the right, y down.
_STROKES = {
    0: [(0.5 + 0.3 * math.sin(a), 0.5 - 0.42 * math.cos(a)) for a in (i * math.tau / 16 for i in range(17))],
    1: [(0.32, 0.28), (0.52, 0.08), (0.52, 0.92)],
    2: [(0.22, 0.28), (0.32, 0.1), (0.55, 0.07), (0.75, 0.22), (0.7, 0.45), (0.2, 0.92), (0.82, 0.92)],
    3: [(0.22, 0.14), (0.5, 0.07), (0.74, 0.2), (0.66, 0.42), (0.42, 0.48), (0.72, 0.56), (0.78, 0.75), (0.55, 0.93),
        (0.2, 0.86)],
    4: [(0.64, 0.92), (0.64, 0.08), (0.18, 0.66), (0.84, 0.66)],
    5: [(0.76, 0.08), (0.3, 0.08), (0.26, 0.45), (0.55, 0.4), (0.78, 0.58), (0.72, 0.84), (0.48, 0.93), (0.22, 0.86)],
    6: [(0.68, 0.08), (0.4, 0.26), (0.24, 0.6), (0.32, 0.87), (0.55, 0.93), (0.76, 0.78), (0.7, 0.56), (0.48, 0.5),
        (0.26, 0.66)],
    7: [(0.2, 0.1), (0.8, 0.1), (0.42, 0.92)],
    8: [(0.5, 0.48), (0.28, 0.3), (0.34, 0.12), (0.5, 0.07), (0.68, 0.13), (0.72, 0.3), (0.5, 0.48), (0.24, 0.7),
        (0.32, 0.88), (0.5, 0.93), (0.7, 0.88), (0.76, 0.7), (0.5, 0.48)],
    9: [(0.74, 0.34), (0.5, 0.5), (0.28, 0.38), (0.3, 0.16), (0.52, 0.07), (0.72, 0.18), (0.74, 0.34), (0.7, 0.65),
        (0.54, 0.92)],
}  # fmt: skip
_POINTS = 17


def _resampled(points: list[tuple[float, float]]) -> Tensor:
    """The stroke as `_POINTS` points at equal distances along it: (_POINTS, 2)."""
    line = torch.tensor(points)
    lengths = (line[1:] - line[:-1]).norm(dim=1).cumsum(0)
    lengths = torch.cat([torch.zeros(1), lengths])
    at = torch.linspace(0, float(lengths[-1]), _POINTS)
    right = torch.searchsorted(lengths, at).clamp(1, len(line) - 1)
    weight = ((at - lengths[right - 1]) / (lengths[right] - lengths[right - 1])).unsqueeze(1)
    return line[right - 1] * (1 - weight) + line[right] * weight


def draw(labels: Tensor, generator: torch.Generator) -> Tensor:
    """Draw a digit for each label, each in a hand of its own: (N,) integers in, (N, 28, 28) uint8 out."""
    n = len(labels)

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return torch.rand(n, *shape, generator=generator) * (high - low) + low

    strokes = torch.stack([_resampled(_STROKES[digit]) for digit in range(10)])[labels] - 0.5
    # A hand that shakes slowly along the stroke, and a slant, size and place of its own.
    phase = torch.linspace(0, 1, _POINTS)
    for wave in (1, 2, 3):
        shift = uniform(0, math.tau, 1, 2)
        strokes = strokes + uniform(0, 0.06, 1, 2) * torch.sin(math.tau * wave * phase.view(1, -1, 1) + shift)
    turn, slant = uniform(-0.35, 0.35), uniform(-0.35, 0.35)
    wide, high = uniform(13, 23), uniform(15, 24)
    x, y = strokes[..., 0] + slant.view(-1, 1) * strokes[..., 1], strokes[..., 1]
    x, y = x * wide.view(-1, 1), y * high.view(-1, 1)
    cos, sin = turn.cos().view(-1, 1), turn.sin().view(-1, 1)
    x, y = x * cos - y * sin + uniform(11.5, 15.5, 1), x * sin + y * cos + uniform(11.5, 15.5, 1)

    # Ink by the distance of a pixel to the nearest piece of the stroke: (N, 28, 28, pieces).
    grid = torch.arange(28.0)
    ax, ay = x[:, None, None, :-1], y[:, None, None, :-1]
    dx, dy = x.diff(dim=1)[:, None, None], y.diff(dim=1)[:, None, None]
    px, py = grid.view(1, 1, 28, 1) - ax, grid.view(1, 28, 1, 1) - ay
    along = ((px * dx + py * dy) / (dx * dx + dy * dy + 1e-6)).clamp(0, 1)
    distance = ((px - along * dx).square() + (py - along * dy).square()).amin(-1).sqrt()
    ink = ((uniform(0.7, 1.7, 1, 1) - distance) / uniform(0.8, 1.6, 1, 1) + 0.5).clamp(0, 1) * uniform(0.5, 1, 1, 1)
    ink = ink + 0.1 * torch.randn(n, 28, 28, generator=generator)
    return (ink.clamp(0, 1) * 255).to(torch.uint8)


def digits(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """`count` drawn digits and their labels, the same for the same seed: (N, 28, 28) uint8, (N,) int64."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 10, (count,), generator=generator)
    return torch.cat([draw(part, generator) for part in labels.split(250)]), labels


def load_digits(folder: Path) -> list[Tensor]:
    """Training images, labels, test images, labels; drawn once, then read from `folder` where it can be written."""
    path = folder / f"digits-{VERSION}.pt"
    if path.exists():
        return list(torch.load(path, weights_only=True))
    data = [*digits(TRAIN, seed=1), *digits(TEST, seed=2)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        torch.save(data, temporary)
        temporary.replace(path)
    except OSError as error:
        print(f"digits are not cached: {error}")
    return data


def load_mnist(folder: Path, download: bool) -> list[Tensor]:
    """The same four tensors from MNIST's own files under `folder`/MNIST/raw; raises SystemExit where there are none."""
    from torchvision.datasets import MNIST  # only here: the generated digits need no torchvision

    try:
        parts = [MNIST(str(folder), train=train, download=download) for train in (True, False)]
    except RuntimeError as error:
        hint = "--data DIR names the folder that holds MNIST/raw; --download gets it"
        raise SystemExit(f"error: no MNIST in {folder}: {error}\nhint: {hint}") from None
    return [tensor for part in parts for tensor in (part.data, part.targets)]


def load(dataset: str, folder: Path, download: bool) -> list[Tensor]:
    """Training images, labels, test images, labels of `digits` or `mnist`."""
    return load_digits(folder) if dataset == "digits" else load_mnist(folder, download)


def normalised(images: Tensor) -> Tensor:
    """uint8 (N, 28, 28) to float (N, 1, 28, 28) with MNIST's mean and deviation, as in the PyTorch examples."""
    return ((images.float() / 255 - 0.1307) / 0.3081).unsqueeze(1)
