"""Each option of the app must have its effect: an option without effect raises no error."""

import contextlib
import os
import re
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.mnist import COUNT
from support.training import ledger, losses, weights
from torch.nn import functional as F

from app import checkpoint, data, replicas, strategy, train
from app.job import STOPPED, Job
from app.model import build
from app.order import GlobalOrder, ShardOrder

SGD = ("--optimizer", "sgd")


@pytest.fixture
def first_loss(small, tmp_path):
    """Train for one epoch with some arguments, and return the losses."""

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


def test_training_must_match_a_plain_loop(small, mnist):
    folder = small(*SGD, "--dtype", "float64", "--epochs", "2", "--seed", "3")
    images, labels, *_ = data.load("mnist", mnist, download=False)
    torch.manual_seed(3)
    net = build("lenet", 1, 28).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)
    expected = []
    for epoch in (1, 2):
        for mine, _ in GlobalOrder(COUNT, 32, 0, 1, seed=3).batches(epoch):
            optimizer.zero_grad()
            loss = F.cross_entropy(net(data.normalised(images[mine], torch.float64)), labels[mine])
            loss.backward()
            optimizer.step()
            expected.append(loss.item())
        scheduler.step()
    assert losses(folder) == pytest.approx(expected, rel=1e-9)
    assert all(value.allclose(weights(folder)[name]) for name, value in net.state_dict().items())


def test_more_accumulation_steps_than_samples_must_give_the_gradients_of_the_whole_batch(first_loss):
    exact = ("--dtype", "float64", "--epochs", "2")
    assert first_loss(*exact, "--accumulate", "20") == pytest.approx(first_loss(*exact), rel=1e-9)


def test_a_model_must_be_in_training_mode_at_each_step(small, monkeypatch):
    modes: list[bool] = []
    monkeypatch.setattr(strategy.Strategy, "average", lambda self: modes.append(self.net.training))
    small("--epochs", "2")
    assert modes == [True] * 14


def test_a_model_must_be_compiled_only_on_request(small, monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda net, mode: compiled.append(mode) or net)
    small()
    assert compiled == []
    small("--compile")
    small("--compile", "reduce-overhead")
    assert compiled == ["default", "reduce-overhead"]


def test_a_ledger_must_be_written_only_on_request(small):
    assert not list(small().glob("ledger-*"))


@pytest.fixture
def parsed(monkeypatch):
    """Parse a command line."""

    def parse(*arguments: str) -> train.argparse.Namespace:
        monkeypatch.setattr(sys, "argv", ["train", *arguments])
        return train.arguments()

    return parse


def test_the_defaults_must_match_the_documentation(parsed):
    defaults = vars(parsed())
    assert {name: defaults[name] for name in ("strategy", "model", "dataset", "optimizer", "schedule", "dtype")} == {
        "strategy": "ddp", "model": "lenet", "dataset": "digits",
        "optimizer": "adadelta", "schedule": "step", "dtype": "float32",
    }  # fmt: skip
    numbers = ("epochs", "batch_size", "accumulate", "gamma", "dropout", "seed", "save_every", "keep", "check_replicas")
    assert [defaults[name] for name in numbers] == [3, 128, 1, 0.7, 1.0, 1, 0, 2, 0]
    assert defaults["resume"] == "none" and defaults["data"] == data.HOME
    unset = ("spawn", "lr", "init_from", "skew_rank", "download", "augment", "amp", "compile", "ledger")
    assert not any(defaults[name] for name in unset)


@pytest.mark.parametrize("name", ["epochs", "batch-size", "accumulate", "keep", "spawn"])
def test_a_count_must_be_at_least_one(parsed, capsys, name):
    assert vars(parsed(f"--{name}", "1"))[name.replace("-", "_")] == 1
    with pytest.raises(SystemExit):
        parsed(f"--{name}", "0")
    assert f"--{name} must be at least 1" in capsys.readouterr().err


def test_an_unknown_data_set_must_be_refused(parsed, capsys):
    assert [parsed("--dataset", name).dataset for name in data.NAMES] == [*data.NAMES]
    assert parsed("--dataset", "shards:x").dataset == "shards:x"
    with pytest.raises(SystemExit):
        parsed("--dataset", "letters")
    assert "--dataset letters: choose from digits, mnist, colours, cifar10, or shards:DIR" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "kind", "rate"),
    [("adadelta", "Adadelta", 2.0), ("sgd", "SGD", 0.05), ("adamw", "AdamW", 0.001)],
)
def test_each_optimizer_must_have_its_own_default_learning_rate(parsed, name, kind, rate):
    for given, expected in (((), rate), (("--lr", "0.3"), 0.3), (("--lr", "0"), 0.0)):
        optimizer = train.optimizer_of(parsed("--optimizer", name, *given), torch.nn.Linear(2, 1))
        assert type(optimizer).__name__ == kind and optimizer.param_groups[0]["lr"] == expected
        assert optimizer.param_groups[0].get("momentum", 0.9) == 0.9


def test_losses_in_mixed_precision_must_be_close_to_full_precision_but_not_equal(first_loss):
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
def test_each_epoch_must_use_the_learning_rate_of_the_schedule(small, monkeypatch, schedule, rates):
    used = []
    step = torch.optim.SGD.step

    def record(self, *arguments):
        used.append(self.param_groups[0]["lr"])
        return step(self, *arguments)

    monkeypatch.setattr(torch.optim.SGD, "step", record)
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
        SystemExit, match=rf"the checkpoint was made with --{name} \S+, not {other[1]}\nhint: use --{name} "
    ):
        small("--resume", "auto", *other)


# --- SIGTERM


@pytest.mark.parametrize(("at", "saved"), [(2, 7), (7, 7), (8, 10), (13, 14)])
def test_a_worker_must_save_its_last_step_on_sigterm_and_exit_with_143(small, monkeypatch, capsys, at, saved):
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
    assert capsys.readouterr().out.endswith(f"stopped by SIGTERM: saved at step {saved}\n")
    folder = os.path.realpath(f"{os.environ['JOB_DIR']}/checkpoints/last")
    state, manifest = checkpoint.load(train.Path(folder))
    assert manifest["step"] == saved
    assert (state["epoch"], state["epoch_step"]) == (saved // 7 + 1, saved % 7)
    assert next(steps) == saved + 1


def test_a_worker_that_gets_sigterm_in_its_last_step_must_finish(small, monkeypatch):
    steps = iter(range(1, 100))
    monkeypatch.setattr(
        strategy.Strategy, "average", lambda self: next(steps) == 7 and signal.raise_signal(signal.SIGTERM)
    )
    assert checkpoint.load(small() / "checkpoints" / "last")[1]["score"] is not None


# --- order and shards


def test_the_order_must_depend_on_the_seed_and_the_epoch():
    def order(seed: int, epoch: int) -> list[int]:
        return [int(i) for mine, _ in GlobalOrder(50, 8, 0, 1, seed).batches(epoch) for i in mine]

    assert order(1, 1) == order(1, 1)
    assert len({tuple(order(seed, epoch)) for seed in (1, 2) for epoch in (1, 2)}) == 4
    assert order(1, 1) != list(range(50))


def test_shards_must_be_shuffled_differently_by_seed_epoch_and_worker():
    def order(seed: int, epoch: int, rank: int = 0) -> list[int]:
        return [int(i) for mine, _ in ShardOrder([50, 50], 16, rank, seed).batches(epoch) for i in mine]

    orders = {tuple(order(seed, epoch, rank)) for seed in (1, 2) for epoch in (1, 2) for rank in (0, 1)}
    assert len(orders) == 8 and order(1, 1) == order(1, 1) != list(range(50))


def test_a_batch_of_shards_must_be_divided_between_all_workers():
    orders = [ShardOrder([50, 20, 40], 16, rank, seed=1) for rank in range(3)]
    assert [order.steps for order in orders] == [10, 10, 10]
    parts = [list(order.batches(epoch=1)) for order in orders]
    assert [len(part[0][0]) for part in parts] == [5, 5, 5]  # a batch of 16 for three workers
    assert [[total for _, total in part] for part in parts] == [[15] * 4 + [10] * 4 + [5] * 2] * 3
    assert [len(mine) for mine, _ in ShardOrder([3, 2], 1, 0, seed=1).batches(epoch=1)] == [1, 1, 1]


def test_an_order_must_yield_nothing_after_its_last_step():
    for order in (GlobalOrder(32, 16, 0, 1, seed=1), ShardOrder([32], 16, 0, seed=1)):
        assert order.steps == 2 and list(order.batches(epoch=1, first=2)) == []


def test_training_from_shards_must_follow_the_seed_and_see_each_sample_once(small, sharded, tmp_path):
    found = []
    for seed in ("1", "2"):
        folder = small("--dataset", f"shards:{sharded}", "--ledger", "--seed", seed)
        found.append([ledger(folder)[step] for step in range(1, 8)])
        assert sorted(sum(found[-1], [])) == list(range(COUNT))
        assert f'"samples": {COUNT}' in (folder / "metrics.jsonl").read_text().splitlines()[-2]
        folder.rename(tmp_path / seed)
    assert found[0] != found[1]


@pytest.mark.parametrize("source", ["mnist", "shards"])
def test_samples_must_come_from_the_selected_data_set(parsed, mnist, sharded, source):
    images, labels, test_images, test_labels = data.load("mnist", mnist, download=False)
    name = "mnist" if source == "mnist" else f"shards:{sharded}"
    found = train.Samples(Job(), parsed("--dataset", name, "--data", str(mnist), "--batch-size", "50"))
    assert torch.equal(found.images, images[found.ids]) and torch.equal(found.labels, labels[found.ids])
    assert sorted(found.ids.tolist()) == list(range(COUNT)) and found.count == COUNT
    assert found.test_images.float().sum() == test_images.float().sum() and len(found.test_labels) == COUNT
    assert found.test_labels.bincount().tolist() == test_labels.bincount().tolist()
    assert found.order.steps == 5


@pytest.mark.parametrize("first", [0, 1, 3])
def test_shards_must_resume_from_the_given_step(first):
    whole = list(ShardOrder([50, 20], 16, 1, seed=1).batches(epoch=2))
    rest = list(ShardOrder([50, 20], 16, 1, seed=1).batches(epoch=2, first=first))
    assert [(mine.tolist(), total) for mine, total in rest] == [(mine.tolist(), total) for mine, total in whole[first:]]


# --- data, evaluation, replicas


@pytest.mark.parametrize("name", ["digits", "colours"])
def test_test_images_must_not_be_among_the_training_images(tmp_path, monkeypatch, name):
    monkeypatch.setattr(data, "TRAIN", 300)
    monkeypatch.setattr(data, "TEST", 300)  # as many: the same seed would give the same images
    images, labels, test_images, test_labels = data.load(name, tmp_path, download=False)
    assert (len(images), len(labels), len(test_images), len(test_labels)) == (300, 300, 300, 300)
    assert not {image.numpy().tobytes() for image in images} & {image.numpy().tobytes() for image in test_images}
    assert len(set(labels.tolist())) == len(set(test_labels.tolist())) == 10


def test_an_evaluation_must_leave_the_model_unchanged_and_see_each_image_once(monkeypatch, tmp_path):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("JOB_DIR", str(tmp_path))
    torch.manual_seed(0)
    images, labels = data.digits(1203, seed=1)
    images = images.unsqueeze(1)
    net = build("batchnorm", 1, 28)
    net.train()
    net(data.normalised(images[:100]))  # so that the statistics differ from their initial values
    before = {name: value.clone() for name, value in net.state_dict().items()}
    loss, accuracy = train.evaluate(Job(), net, images, labels)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    net.eval()
    with torch.no_grad():
        output = net(data.normalised(images))
    assert loss == pytest.approx(float(torch.nn.functional.cross_entropy(output, labels)), rel=1e-5)
    assert accuracy == int((output.argmax(1) == labels).sum()) / 1203


def test_cifar_images_must_be_upright_with_channels_first(monkeypatch, tmp_path):
    images = torch.arange(2 * 32 * 32 * 3).remainder(251).to(torch.uint8).view(2, 32, 32, 3)  # as torchvision has them
    part = SimpleNamespace(data=images.numpy(), targets=[0, 0])
    monkeypatch.setattr("torchvision.datasets.CIFAR10", lambda folder, train, download: part)
    for found in data.load("cifar10", tmp_path, download=False)[::2]:
        assert found.shape == (2, 3, 32, 32) and found.is_contiguous()
        assert torch.equal(found[1, 2, 5], images[1, 5, :, 2])


def test_a_partly_written_data_set_must_not_be_left_on_a_full_disk(monkeypatch, tmp_path):
    def half(tensors: list[torch.Tensor], path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(data.torch, "save", half)
    drawn = data.load_or_draw(lambda count, seed: (torch.zeros(1), torch.ones(1)), tmp_path, "digits")
    assert [int(part) for part in drawn] == [0, 1, 0, 1]
    assert not (tmp_path / f"digits-{data.VERSION}.pt").exists()


@pytest.mark.parametrize("scale", [0.0, 0.5, 1.0])
def test_dropout_must_scale_both_rates(scale):
    net = build("mnist", 1, 28, scale)
    assert (net.dropout1.p, net.dropout2.p) == (0.25 * scale, 0.5 * scale)


@pytest.mark.parametrize(("values", "odd"), [("baa", [0]), ("aba", [1]), ("ab", [1]), ("abca", [1, 2]), ("aaa", [])])
def test_replicas_that_differ_from_the_majority_must_be_named(monkeypatch, values, odd):
    job = Job()
    monkeypatch.setattr(job, "gather", lambda _: [torch.full((32,), ord(value)) for value in values])
    named = ", ".join(f"rank {rank} ({values[rank].encode().hex() * 4})" for rank in odd)
    expected = f"error: replicas differ at step 7: {named}; the other {len(values) - len(odd)} have 61616161"
    with pytest.raises(SystemExit, match=re.escape(expected)) if odd else contextlib.nullcontext():
        replicas.check(job, torch.nn.Linear(1, 1), 7)


def test_replicas_must_be_compared_by_all_their_parameters():
    torch.manual_seed(0)
    net = build("lenet", 1, 28)
    digests = [bytes(replicas.digest(net).tolist())]
    for parameter in net.parameters():
        with torch.no_grad():
            parameter.view(-1)[-1] += 1e-6
        digests.append(bytes(replicas.digest(net).tolist()))
    assert len(set(digests)) == len(digests) == 9
