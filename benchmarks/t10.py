"""Seconds to 98 % on the digits: ours, against the PyTorch examples' way of one image at a time through PIL."""

import statistics
import time
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms
from torchvision.transforms.functional import to_pil_image

from app import data
from app.model import Mnist

GOAL, MOST = 0.98, 6  # accuracy, epochs


class OneByOne(Dataset[Any]):
    """As torchvision's MNIST does it: every image becomes a PIL image, then a tensor, then is normalised."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        self.images, self.labels = images, labels
        steps = [transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))]
        self.transform = transforms.Compose(steps)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: int) -> Any:
        return self.transform(to_pil_image(self.images[i])), int(self.labels[i])


def seconds_to_goal(batches: Any, tests: Any, dtype: torch.dtype = torch.float32) -> float:
    """Train until the goal; only the input differs between the two."""
    torch.manual_seed(1)
    net = Mnist(1, 28)
    optimizer = torch.optim.Adadelta(net.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)
    started = time.perf_counter()
    for _ in range(MOST):
        net.train()
        for x, y in batches():
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
        scheduler.step()
        net.eval()
        with torch.no_grad():
            right = [(net(x).argmax(1) == y).float().sum() for x, y in tests()]
        if float(sum(right)) / data.TEST >= GOAL:
            break
    return time.perf_counter() - started


def measure(runs: int) -> dict[str, Any]:
    """Interleaved runs, two threads each."""
    images, labels, test_images, test_labels = data.load("digits", data.HOME, download=False)
    torch.set_num_threads(2)

    def ours(x: torch.Tensor, y: torch.Tensor, size: int, shuffle: bool) -> Any:
        order = torch.randperm(len(x)) if shuffle else torch.arange(len(x))
        for part in order.split(size):
            yield data.normalised(x[part]), y[part]

    train_loader = DataLoader(OneByOne(images, labels), 64, shuffle=True)
    test_loader = DataLoader(OneByOne(test_images, test_labels), 1000)
    times: dict[str, list[float]] = {"one image at a time": [], "ours: the whole batch at once": []}
    for _ in range(runs):
        times["one image at a time"].append(seconds_to_goal(lambda: train_loader, lambda: test_loader))
        times["ours: the whole batch at once"].append(
            seconds_to_goal(lambda: ours(images, labels, 64, True), lambda: ours(test_images, test_labels, 1000, False))
        )
    middle = [statistics.median(values) for values in times.values()]
    return {
        "values": {name: (values, "s") for name, values in times.items()},
        "ratios": {"times faster (≥ 3)": middle[0] / middle[1]},
    }
