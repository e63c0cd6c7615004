"""Datasets that fit in memory, as tensors: generated offline, or read from files in a folder."""

import contextlib
import functools
import math
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

NAMES = ("digits", "mnist", "colours", "cifar10")
HOME = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "orchestrate"
TRAIN, TEST = 12_000, 2_000  # images of the generated set
VERSION = 1  # of the generator below: cached sets of other versions are ignored

# Each digit as one pen stroke: points in a unit square, x to the right, y down.
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
    """Resample a stroke to `_POINTS` equidistant points: (_POINTS, 2)."""
    line = torch.tensor(points)
    lengths = (line[1:] - line[:-1]).norm(dim=1).cumsum(0)
    lengths = torch.cat([torch.zeros(1), lengths])
    at = torch.linspace(0, float(lengths[-1]), _POINTS)
    right = torch.searchsorted(lengths, at).clamp(1, len(line) - 1)
    weight = ((at - lengths[right - 1]) / (lengths[right] - lengths[right - 1])).unsqueeze(1)
    return line[right - 1] * (1 - weight) + line[right] * weight


def draw(labels: Tensor, generator: torch.Generator) -> Tensor:
    """Draw a digit for each label, each in a different handwriting: (N,) integers in, (N, 28, 28) uint8 out."""
    n = len(labels)

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return torch.rand(n, *shape, generator=generator) * (high - low) + low

    strokes = torch.stack([_resampled(_STROKES[digit]) for digit in range(10)])[labels] - 0.5
    # Slow wobble along the stroke; random slant, size and position.
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

    # Ink by the distance of a pixel to the nearest segment of the stroke: (N, 28, 28, segments).
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
    """Generate `count` digits and labels, deterministic by seed: (N, 28, 28) uint8, (N,) int64."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 10, (count,), generator=generator)
    return torch.cat([draw(part, generator) for part in labels.split(250)]), labels


def colours(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Generate colored digits on colored paper, in CIFAR's shape: (N, 3, 32, 32) uint8, (N,) int64."""
    images, labels = digits(count, seed)
    generator = torch.Generator().manual_seed(seed)
    ink = F.pad(images, (2, 2, 2, 2)).unsqueeze(1).float() / 255
    pen, left, right = (torch.rand(count, 3, 1, 1, generator=generator) * 255 for _ in range(3))
    slope = torch.linspace(0, 1, 32)
    paper = left + (right - left) * slope
    return (paper + (pen - paper) * ink).to(torch.uint8), labels


def load_or_draw(draw_set: Any, folder: Path, name: str) -> list[Tensor]:
    """The four tensors of a generated set; cached in `folder` if it is writable."""
    path = folder / f"{name}-{VERSION}.pt"
    if path.exists():
        return list(torch.load(path, weights_only=True))
    data = [*draw_set(TRAIN, seed=1), *draw_set(TEST, seed=2)]
    temporary = path.with_suffix(f".{os.getpid()}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(data, temporary)
        temporary.replace(path)
    except (OSError, RuntimeError) as error:  # torch raises the latter on a full disk
        with contextlib.suppress(OSError):
            temporary.unlink()
        print(f"could not cache {name}: {error}")
    return data


def _files(name: str, folder: Path, download: bool) -> list[Tensor]:
    """The four tensors of MNIST or CIFAR-10, from their files; raises SystemExit if they are missing."""
    from torchvision import datasets  # only here: generated data needs no torchvision

    kind = {"mnist": datasets.MNIST, "cifar10": datasets.CIFAR10}[name]
    try:
        parts = [kind(str(folder), train=train, download=download) for train in (True, False)]
    except RuntimeError as error:
        hint = "set --data to the folder that contains MNIST/raw or cifar-10-batches-py, or use --download"
        raise SystemExit(f"error: no {name} in {folder}: {error}\nhint: {hint}") from None
    return [torch.as_tensor(values) for part in parts for values in (part.data, part.targets)]


def load(name: str, folder: Path, download: bool) -> list[Tensor]:
    """Training images, labels, test images, labels: (N, C, H, W) uint8 and (N,) int64."""
    drawn = {"digits": digits, "colours": colours}
    images = load_or_draw(drawn[name], folder, name) if name in drawn else _files(name, folder, download)
    for i in (0, 2):
        if images[i].dim() == 3:
            images[i] = images[i].unsqueeze(1)  # grayscale
        elif images[i].shape[-1] == 3:
            images[i] = images[i].permute(0, 3, 1, 2).contiguous()  # torchvision stores CIFAR with channels last
    return images


# Mean and standard deviation of MNIST, as in the PyTorch examples, and of CIFAR-10 by channel.
_GRAY = ((0.1307,), (0.3081,))
_COLOR = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))


def normalised(images: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normalize uint8 (N, C, H, W) to floats with mean 0 and standard deviation 1."""
    mean, deviation = _statistics(images.shape[1], dtype, images.device)
    return (images.to(dtype) / 255 - mean) / deviation


@functools.cache  # a copy to a GPU would synchronize with it at each step
def _statistics(channels: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each channel: (C, 1, 1) both."""
    mean, deviation = (torch.tensor(v, dtype=dtype, device=device) for v in (_GRAY if channels == 1 else _COLOR))
    return mean.view(-1, 1, 1), deviation.view(-1, 1, 1)


def augmented(images: Tensor) -> Tensor:
    """Shift each image by up to two pixels and mirror color images at random; the whole batch at once."""
    n, channels, height, width = images.shape
    padded = F.pad(images, (2, 2, 2, 2))
    down, right = torch.randint(0, 5, (2, n, 1), device=images.device)
    rows = (down + torch.arange(height, device=images.device)).view(n, 1, height, 1)
    columns = (right + torch.arange(width, device=images.device)).view(n, 1, 1, width)
    if channels == 3:
        mirrored = torch.rand(n, 1, 1, 1, device=images.device) < 0.5
        columns = torch.where(mirrored, columns.flip(3), columns)
    batch = torch.arange(n, device=images.device).view(n, 1, 1, 1)
    channel = torch.arange(channels, device=images.device).view(1, channels, 1, 1)
    return padded[batch, channel, rows, columns]
