"""A rewrite of the PyTorch examples' MNIST script, the peer in `time-to-accuracy`.

The same network, optimizer, schedule and batch size; every image goes through PIL and a transform separately, as with
torchvision's dataset. `python benchmarks/mnist.py DATASET SEED [DEVICE]`
"""

import sys
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms
from torchvision.transforms.functional import to_pil_image

from app import data
from app.model import Mnist

EPOCHS = 14


class Images(Dataset[Any]):  # type: ignore[misc]
    """One image at a time: (1, 28, 28) floats and a label."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        self.images, self.labels = images, labels
        steps = [transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))]
        self.transform = transforms.Compose(steps)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: int) -> Any:
        return self.transform(to_pil_image(self.images[i])), int(self.labels[i])


def main(dataset: str, seed: int, device: str = "cpu") -> None:
    """Train, and print the accuracy after each epoch."""
    images, labels, test_images, test_labels = data.load(dataset, data.HOME, download=False)
    torch.manual_seed(seed)
    train_loader = DataLoader(Images(images, labels), 64, shuffle=True)
    test_loader = DataLoader(Images(test_images, test_labels), 1000)
    net = Mnist(1, 28).to(device)
    optimizer = torch.optim.Adadelta(net.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)
    for epoch in range(1, EPOCHS + 1):
        net.train()
        for x, y in train_loader:
            optimizer.zero_grad()
            F.cross_entropy(net(x.to(device)), y.to(device)).backward()
            optimizer.step()
        scheduler.step()
        net.eval()
        with torch.no_grad():
            right = sum(int((net(x.to(device)).argmax(1) == y.to(device)).sum()) for x, y in test_loader)
        print(f"epoch {epoch}/{EPOCHS}: accuracy {right / len(test_labels):.2%}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
