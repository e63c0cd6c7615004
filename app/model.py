"""Models from common tutorials. All return logits, which `cross_entropy` expects.

A softmax before `cross_entropy`, as in one popular tutorial, applies softmax twice: the loss can no longer approach
zero (for ten classes it stays above 1.46), gradients shrink, and no error is raised.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

NAMES = ("lenet", "mnist", "batchnorm", "resnet18")


class LeNet(nn.Module):
    """Two convolutions, each with pooling, as in LeCun et al. 1998: (N, C, S, S) in, (N, 10) logits out.

    A tenth of the multiplications of `Mnist`, with the same accuracy on digits. Each ReLU follows its pooling, which
    gives the same values with a quarter of the work.
    """

    def __init__(self, channels: int, side: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 16, 5)
        self.conv2 = nn.Conv2d(16, 32, 5)
        self.fc1 = nn.Linear(32 * (((side - 4) // 2 - 4) // 2) ** 2, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        x = F.relu(self.fc1(torch.flatten(x, 1)))
        return self.fc2(x)


class Mnist(nn.Module):
    """The network of the PyTorch examples, with dropout: (N, C, S, S) in, S 28 or 32; (N, 10) logits out."""

    def __init__(self, channels: int, side: int, dropout: float = 1.0) -> None:
        """Scale the original dropout rates, 0.25 and 0.5, by `dropout`."""
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.dropout1 = nn.Dropout(0.25 * dropout)
        self.dropout2 = nn.Dropout(0.5 * dropout)
        self.fc1 = nn.Linear(64 * ((side - 4) // 2) ** 2, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = self.dropout1(F.max_pool2d(x, 2))
        x = self.dropout2(F.relu(self.fc1(torch.flatten(x, 1))))
        return self.fc2(x)


class BatchNorm(nn.Sequential):
    """Two convolutions with batch norm: (N, 1, 28, 28) in, (N, 10) logits out; 1600 features before linear layers."""

    def __init__(self, channels: int, side: int) -> None:
        inputs = 64 * (((side - 2) // 2 - 2) // 2) ** 2
        super().__init__(
            nn.Conv2d(channels, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(inputs, 128), nn.ReLU(), nn.Linear(128, 10),
        )  # fmt: skip


def resnet18(channels: int) -> nn.Module:
    """torchvision's ResNet-18 with ten classes, and a stem for small images instead of a strided 7×7 convolution."""
    from torchvision.models import resnet18  # only here: the other models need no torchvision

    net: nn.Module = resnet18(num_classes=1000)
    net.conv1 = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
    net.maxpool = nn.Identity()
    net.fc = nn.Linear(net.fc.in_features, 10)
    return net


def build(name: str, channels: int, side: int, dropout: float = 1.0) -> nn.Module:
    """Build the model called `name` for square images of `side` pixels."""
    if name == "mnist":
        return Mnist(channels, side, dropout)
    small = {"lenet": LeNet, "batchnorm": BatchNorm}.get(name)
    return small(channels, side) if small else resnet18(channels)
