"""The app must reach its target accuracy, and save files that can be read again."""

import pytest
import torch
from torch.nn import functional as F

from app import data


@pytest.fixture(scope="session")
def digits():
    return [*data.digits(4000, seed=1), *data.digits(1000, seed=2)]


def test_the_same_seed_must_draw_the_same_digits():
    first, again, other = (data.digits(300, seed)[0] for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert (first.shape, first.dtype) == ((300, 28, 28), torch.uint8)


def test_the_digits_must_be_hard_for_a_linear_model(digits):
    images, labels, test_images, test_labels = digits
    torch.manual_seed(0)
    inputs = data.normalised(images.unsqueeze(1)).flatten(1)
    model = torch.nn.Linear(784, 10)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(20):
        for part in torch.randperm(len(inputs)).split(64):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs[part]), labels[part]).backward()
            optimizer.step()
    correct = model(data.normalised(test_images.unsqueeze(1)).flatten(1)).argmax(1) == test_labels
    assert 0.6 < correct.float().mean() < 0.92
