"""What the app is asked for must have its effect: an option that changes nothing raises no error."""

import contextlib
import os
import re
import signal
from pathlib import Path

import pytest
import torch
from test_training import losses

from app import checkpoint, data, replicas, strategy, train
from app.job import STOPPED, Job
from app.model import build
from app.order import GlobalOrder, ShardOrder

SGD = ("--optimizer", "sgd")


@pytest.fixture
def first_loss(small, tmp_path):
    """The losses of one epoch with some arguments."""

    def train_with(*arguments: str) -> list[float]:
        (tmp_path / "job" / "metrics.jsonl").unlink(missing_ok=True)
        return losses(small(*SGD, *arguments))

    return train_with


def test_the_same_arguments_must_give_the_same_losses(first_loss):
    assert first_loss() == first_loss()


@pytest.mark.parametrize(
    ("options", "base"),
    [
        (("--augment",), ()),
        (("--seed", "2"), ()),
        (("--lr", "0.01"), ()),
        (("--batch-size", "64"), ()),
        (("--model", "mnist", "--dropout", "0"), ("--model", "mnist")),
    ],
    ids=" ".join,
)
def test_an_option_must_change_the_losses(first_loss, options, base):
    assert first_loss(*base, *options)[1:] != first_loss(*base)[1:]


def test_mixed_precision_must_be_near_the_full_one_and_not_equal(first_loss):
    mixed, full = first_loss("--amp"), first_loss()
    assert mixed != full
    assert mixed == pytest.approx(full, abs=0.05)


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        (("step", "--gamma", "0.5"), [0.08, 0.04, 0.02]),
        (("cosine",), [0.08, 0.06, 0.02]),  # of three epochs: 0.04 × (1 + cos(π × epoch / 3))
        (("none",), [0.08, 0.08, 0.08]),
    ],
    ids=["step", "cosine", "none"],
)
def test_each_epoch_must_have_the_learning_rate_of_the_schedule(small, monkeypatch, schedule, rates):
    used = []
    step = torch.optim.SGD.step

    def noted(self, *arguments):
        used.append(self.param_groups[0]["lr"])
        return step(self, *arguments)

    monkeypatch.setattr(torch.optim.SGD, "step", noted)
    small(*SGD, "--lr", "0.08", "--epochs", "3", "--schedule", *schedule)
    assert used[::7] == pytest.approx(rates) and len(used) == 21
    assert [len(set(used[epoch : epoch + 7])) for epoch in (0, 7, 14)] == [1, 1, 1]


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("batch-size", ("--batch-size", "16")),
        ("seed", ("--seed", "2")),
        ("model", ("--model", "batchnorm")),
        ("optimizer", ("--optimizer", "sgd")),
        ("dataset", ()),
    ],
)
def test_a_checkpoint_of_another_job_must_be_refused_with_the_difference(small, sharded, name, other):
    small()
    other = other or ("--dataset", f"shards:{sharded}")
    with pytest.raises(
        SystemExit, match=rf"the checkpoint was made with --{name} \S+, not {other[1]}\nhint: --{name} "
    ):
        small("--resume", "auto", *other)


# --- asked to end


@pytest.mark.parametrize(("at", "saved"), [(2, 7), (7, 7), (8, 10), (13, 14)])
def test_a_worker_that_is_asked_to_end_must_save_its_last_step_and_say_so_by_its_code(small, monkeypatch, at, saved):
    steps = iter(range(1, 100))

    def average(self) -> None:
        if next(steps) == at:
            signal.raise_signal(signal.SIGTERM)

    def leave(code: int = 0) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(strategy.Strategy, "average", average)
    monkeypatch.setattr(train, "leave", leave)
    with pytest.raises(SystemExit) as ended:
        small("--epochs", "3")
    assert ended.value.code == STOPPED == 143
    folder = os.path.realpath(f"{os.environ['JOB_DIR']}/checkpoints/last")
    state, manifest = checkpoint.load(train.Path(folder))
    assert manifest["step"] == saved
    assert (state["epoch"], state["epoch_step"]) == (saved // 7 + 1, saved % 7)
    assert next(steps) == saved + 1


def test_a_worker_that_is_asked_to_end_in_its_very_last_step_must_have_finished(small, monkeypatch):
    steps = iter(range(1, 100))
    monkeypatch.setattr(
        strategy.Strategy, "average", lambda self: next(steps) == 7 and signal.raise_signal(signal.SIGTERM)
    )
    assert checkpoint.load(small() / "checkpoints" / "last")[1]["score"] is not None


# --- order and shards


def test_the_order_must_follow_from_the_seed_and_the_epoch():
    def order(seed: int, epoch: int) -> list[int]:
        return [int(i) for mine, _ in GlobalOrder(50, 8, 0, 1, seed).batches(epoch) for i in mine]

    assert order(1, 1) == order(1, 1)
    assert len({tuple(order(seed, epoch)) for seed in (1, 2) for epoch in (1, 2)}) == 4
    assert order(1, 1) != list(range(50))


def test_shards_must_be_shuffled_anew_each_epoch_by_the_seed_and_each_workers_in_its_own_way():
    def order(seed: int, epoch: int, rank: int = 0) -> list[int]:
        return [int(i) for mine, _ in ShardOrder([50, 50], 16, rank, seed).batches(epoch) for i in mine]

    orders = {tuple(order(seed, epoch, rank)) for seed in (1, 2) for epoch in (1, 2) for rank in (0, 1)}
    assert len(orders) == 8 and order(1, 1) == order(1, 1) != list(range(50))


@pytest.mark.parametrize("first", [0, 1, 3])
def test_shards_must_go_on_from_the_step_that_is_asked_for(first):
    whole = list(ShardOrder([50, 20], 16, 1, seed=1).batches(epoch=2))
    rest = list(ShardOrder([50, 20], 16, 1, seed=1).batches(epoch=2, first=first))
    assert [(mine.tolist(), total) for mine, total in rest] == [(mine.tolist(), total) for mine, total in whole[first:]]


# --- data, evaluation, replicas


@pytest.mark.parametrize("name", ["digits", "colours"])
def test_the_test_images_must_be_others_than_those_that_are_trained_on(tmp_path, monkeypatch, name):
    monkeypatch.setattr(data, "TRAIN", 300)
    monkeypatch.setattr(data, "TEST", 300)  # as many, so that the same seed would draw the same
    images, labels, test_images, test_labels = data.load(name, tmp_path, download=False)
    assert (len(images), len(labels), len(test_images), len(test_labels)) == (300, 300, 300, 300)
    assert not {image.numpy().tobytes() for image in images} & {image.numpy().tobytes() for image in test_images}
    assert len(set(labels.tolist())) == len(set(test_labels.tolist())) == 10


def test_an_evaluation_must_leave_the_model_as_it_is_and_see_each_image_once(monkeypatch, tmp_path):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("JOB_DIR", str(tmp_path))
    torch.manual_seed(0)
    images, labels = data.digits(1203, seed=1)
    images = images.unsqueeze(1)
    net = build("batchnorm", 1, 28)
    net.train()
    net(data.normalised(images[:100]))  # statistics other than those of the first moment
    before = {name: value.clone() for name, value in net.state_dict().items()}
    loss, accuracy = train.evaluate(Job(), net, images, labels)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    net.eval()
    with torch.no_grad():
        output = net(data.normalised(images))
    assert loss == pytest.approx(float(torch.nn.functional.cross_entropy(output, labels)), rel=1e-5)
    assert accuracy == int((output.argmax(1) == labels).sum()) / 1203


def test_cifars_images_must_be_upright_with_their_channels_first(monkeypatch, tmp_path):
    images = torch.arange(2 * 32 * 32 * 3).remainder(251).to(torch.uint8).view(2, 32, 32, 3)  # as torchvision has them
    monkeypatch.setattr(data, "_files", lambda *_: [images, torch.zeros(2), images, torch.zeros(2)])
    for found in data.load("cifar10", tmp_path, download=False)[::2]:
        assert found.shape == (2, 3, 32, 32) and found.is_contiguous()
        assert torch.equal(found[1, 2, 5], images[1, 5, :, 2])


def test_half_a_drawn_set_must_never_be_found_where_the_disk_is_full(monkeypatch, tmp_path):
    def half(tensors: list[torch.Tensor], path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(data.torch, "save", half)
    drawn = data._drawn(lambda count, seed: (torch.zeros(1), torch.ones(1)), tmp_path, "digits")
    assert [int(part) for part in drawn] == [0, 1, 0, 1]
    assert not (tmp_path / f"digits-{data.VERSION}.pt").exists()


@pytest.mark.parametrize("scale", [0.0, 0.5, 1.0])
def test_dropout_must_scale_both_rates(scale):
    net = build("mnist", 1, 28, scale)
    assert (net.dropout1.p, net.dropout2.p) == (0.25 * scale, 0.5 * scale)


@pytest.mark.parametrize(("values", "odd"), [("baa", [0]), ("aba", [1]), ("ab", [1]), ("abca", [1, 2]), ("aaa", [])])
def test_of_replicas_that_differ_those_unlike_most_must_be_named(monkeypatch, values, odd):
    made = Job()
    monkeypatch.setattr(made, "gather", lambda _: [torch.full((32,), ord(value)) for value in values])
    named = ", ".join(f"rank {rank} ({values[rank].encode().hex() * 4})" for rank in odd)
    expected = f"error: replicas differ at step 7: {named}; the other {len(values) - len(odd)} have 61616161"
    with pytest.raises(SystemExit, match=re.escape(expected)) if odd else contextlib.nullcontext():
        replicas.check(made, torch.nn.Linear(1, 1), 7)


def test_replicas_must_be_compared_in_all_their_parameters():
    torch.manual_seed(0)
    net = build("lenet", 1, 28)
    digests = [bytes(replicas.digest(net).tolist())]
    for parameter in net.parameters():
        with torch.no_grad():
            parameter.view(-1)[-1] += 1e-6
        digests.append(bytes(replicas.digest(net).tolist()))
    assert len(set(digests)) == len(digests) == 9
