"""Mistakes that raise no error: which worker trains on which samples, with which gradients, and how a run resumes."""

import json
import pickle
import re
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.gangs import Gang
from support.mnist import COUNT
from support.pairs import pairs
from support.training import command, here, ledger, losses, ok, same, weights
from support.waiting import eventually
from torch.nn import functional as F

from app import checkpoint, data, shards
from app.model import build
from app.order import GlobalOrder, ShardOrder


def gang(mnist: Path, folder: Path, workers: int, *arguments: str) -> Gang:
    """The app in that many workers, or in a single process if that is 0."""
    return Gang(folder, workers, command(mnist, *arguments)[3:])


def train(mnist: Path, folder: Path, workers: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    return gang(mnist, folder, workers, *arguments).end()


EXACT = ("--dtype", "float64", "--epochs", "2", "--ledger", "--optimizer", "sgd")


@pytest.fixture(scope="module")
def single(mnist, tmp_path_factory):
    folder = tmp_path_factory.mktemp("single")
    ok(train(mnist, folder, 0, "--strategy", "single", *EXACT))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "strategy"), pairs([2, 3, 4], ["ddp", "manual"]))
def test_workers_together_must_match_a_single_process_and_see_each_sample_once(
    mnist, single, tmp_path, strategy, workers
):
    ok(train(mnist, tmp_path, workers, "--strategy", strategy, *EXACT, "--check-replicas", "3"))
    assert len(losses(single)) == 14  # 203 samples, 32 at a time, twice
    assert losses(tmp_path) == pytest.approx(losses(single), abs=1e-6, rel=0)
    assert ledger(tmp_path) == ledger(single)
    for epoch in (range(1, 8), range(8, 15)):
        seen = [sample for step in epoch for sample in ledger(tmp_path)[step]]
        assert sorted(seen) == list(range(COUNT))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["manual", "ddp"])
def test_accumulated_gradients_must_match_those_of_the_whole_batch(mnist, single, tmp_path, strategy):
    ok(train(mnist, tmp_path, 2, "--strategy", strategy, *EXACT, "--accumulate", "3"))
    assert losses(tmp_path) == pytest.approx(losses(single), abs=1e-6, rel=0)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [pytest.param("manual", marks=pytest.mark.exhaustive), "ddp"])
def test_all_workers_together_must_evaluate_the_saved_weights_on_every_image_once(mnist, tmp_path, strategy):
    arguments = ("--model", "batchnorm", "--strategy", strategy, "--dtype", "float64", "--epochs", "1")
    ok(train(mnist, tmp_path, 2, *arguments))
    _, _, images, labels = data.load("mnist", mnist, download=False)
    net = build("batchnorm", 1, 28).to(torch.float64).eval()
    net.load_state_dict(weights(tmp_path))  # with the statistics of rank 0
    with torch.no_grad():
        output = net(data.normalised(images, torch.float64))
    *_, pace, epoch, save = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert save["save_seconds"] > 0
    assert len(pace["rank_seconds"]) == 2 and min(pace["rank_seconds"]) > 0
    assert epoch["test_loss"] == pytest.approx(float(F.cross_entropy(output, labels)), rel=1e-9)
    assert epoch["test_accuracy"] == int((output.argmax(1) == labels).sum()) / len(labels)


def test_a_worker_without_samples_must_not_change_the_statistics_of_a_batch_norm(mnist, tmp_path):
    few = ("--model", "batchnorm", "--strategy", "single", "--epochs", "1", "--batch-size", "3")
    for count in ("3", "5"):  # two of the five parts of a batch are empty
        ok(train(mnist, tmp_path / count, 0, *few, "--accumulate", count))
    three, five = weights(tmp_path / "3"), weights(tmp_path / "5")
    assert all(torch.equal(three[name], five[name]) for name in three)


@pytest.mark.slow
def test_random_numbers_must_differ_between_workers(kept):
    states = checkpoint.load(kept / "checkpoints" / "last")[0]["random"]
    assert len({bytes(state.tolist()) for state in states}) == 3


@pytest.mark.slow
def test_more_workers_than_samples_in_a_batch_must_still_match_a_single_process(mnist, tmp_path):
    few = ("--dtype", "float64", "--epochs", "1", "--batch-size", "100", "--optimizer", "sgd")
    ok(train(mnist, tmp_path / "one", 0, "--strategy", "single", *few))
    ok(train(mnist, tmp_path / "four", 4, *few))  # the last batch has three samples for four workers
    assert losses(tmp_path / "four") == pytest.approx(losses(tmp_path / "one"), abs=1e-6, rel=0)


@pytest.mark.slow
def test_a_worker_with_wrong_gradients_must_be_detected_and_named(mnist, tmp_path):
    done = train(mnist, tmp_path, 3, "--check-replicas", "2", "--skew-rank", "1")
    assert done.returncode != 0
    assert "error: replicas differ at step 2: rank 1 (" in done.stderr
    assert "the other 2 have" in done.stderr


@pytest.mark.parametrize("count", [1, 7, 64, 100, 203])
@pytest.mark.parametrize("workers", [1, 2, 3, 4, 16])
def test_every_order_must_yield_each_sample_exactly_once(count, workers):
    orders = [GlobalOrder(count, 16, rank, workers, seed=1) for rank in range(workers)]
    taken = [list(order.batches(epoch=3)) for order in orders]
    assert {len(batches) for batches in taken} == {orders[0].steps}
    for step in range(orders[0].steps):
        assert sum(len(batches[step][0]) for batches in taken) == taken[0][step][1]
    assert sorted(int(i) for batches in taken for mine, _ in batches for i in mine) == list(range(count))
    half = [list(order.batches(epoch=3, first=orders[0].steps // 2)) for order in orders]
    for whole, rest in zip(taken, half):
        assert [mine.tolist() for mine, _ in whole[orders[0].steps // 2 :]] == [mine.tolist() for mine, _ in rest]


def test_global_batches_must_depend_on_the_epoch_and_not_on_the_number_of_workers():
    def batches(workers: int, epoch: int) -> list[list[int]]:
        orders = [GlobalOrder(50, 8, rank, workers, seed=1) for rank in range(workers)]
        parts = zip(*(order.batches(epoch) for order in orders))
        return [sorted(int(i) for mine, _ in part for i in mine) for part in parts]

    assert batches(1, 1) == batches(3, 1) != batches(1, 2)


def test_shards_of_unequal_size_must_yield_each_sample_exactly_once():
    orders = [ShardOrder([10, 3, 0, 7], 8, rank, seed=1) for rank in range(4)]
    taken = [list(order.batches(epoch=1)) for order in orders]
    assert [sorted(int(i) for mine, _ in batches for i in mine) for batches in taken] == [
        list(range(10)), list(range(3)), [], list(range(7)),
    ]  # fmt: skip
    for step in range(orders[0].steps):
        assert {batches[step][1] for batches in taken} == {sum(len(batches[step][0]) for batches in taken)}


def test_shards_must_contain_every_sample_once_in_files_of_unequal_size(mnist, sharded):
    index = json.loads((sharded / "index.json").read_text())
    sizes = [size for name, size in index.items() if name.startswith("train")]
    assert len(sizes) == 5 and len(set(sizes)) > 1 and sum(sizes) == COUNT
    images = torch.cat([load_file(sharded / name)["images"] for name in index if name.startswith("train")])
    assert torch.equal(images, data.load("mnist", mnist, download=False)[0])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "index.json").unlink(), "index.json"),
        (lambda folder: (folder / "train-00001.safetensors").unlink(), "shard .*train-00001"),
        (lambda folder: (folder / "train-00001.safetensors").write_bytes(b"x"), "shard .*train-00001"),
        (lambda folder: (folder / "index.json").write_text('{"train-/../x": 1}'), "outside the folder"),
        (lambda folder: (folder / "index.json").write_text("[]"), "index.json"),
    ],
)
def test_damaged_shards_must_be_refused_by_name(sharded, damage, message):
    damage(sharded)
    with pytest.raises(SystemExit) as caught:
        shards.Shards(sharded, "train", 0, 1)
    assert re.search(message, str(caught.value))


def test_fewer_shards_than_workers_must_be_refused(sharded):
    assert len(shards.Shards(sharded, "train", 4, 5).images)
    with pytest.raises(SystemExit, match="5 train shards in .* for 6 workers"):
        shards.Shards(sharded, "train", 0, 6)


def killed_at(mnist: Path, folder: Path, step: int, *arguments: str) -> None:
    """Train on three workers until rank 0 has `step` in its ledger and has saved once, then SIGKILL them all."""
    job, path = gang(mnist, folder, 3, *arguments), folder / "ledger-0.jsonl"
    eventually(lambda: path.exists() and f'"step": {step},' in path.read_text())
    eventually(lambda: [*folder.glob("checkpoints/step-*")])
    job.kill()


# A model with dropout: random numbers must continue from the checkpoint, too.
MODEL = ("--model", "mnist", "--schedule", "cosine")
RESUMED = (*MODEL, "--epochs", "3", "--save-every", "2", "--ledger", "--resume", "auto")


@pytest.fixture(scope="module")
def kept(mnist, tmp_path_factory):
    folder = tmp_path_factory.mktemp("kept")
    ok(train(mnist, folder, 3, *RESUMED))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "step", [7, *(pytest.param(step, marks=pytest.mark.exhaustive) for step in (5, 12))]
)  # in an epoch
def test_a_run_that_was_killed_and_resumed_must_equal_an_uninterrupted_one(mnist, kept, tmp_path, step):
    killed = tmp_path / "killed"  # of three workers: sums of two do not depend on the order
    killed_at(mnist, killed, step, *RESUMED)
    assert len(losses(killed)) < 21
    done = ok(train(mnist, killed, 3, *RESUMED))
    assert "resumed after step" in done.stdout
    assert same(weights(killed), weights(kept))
    assert ledger(killed) == ledger(kept)


@pytest.mark.slow
def test_a_resume_with_another_number_of_workers_must_keep_the_global_order(mnist, tmp_path):
    kept, resumed = tmp_path / "kept", tmp_path / "resumed"
    ok(train(mnist, kept, 0, "--strategy", "single", *EXACT))
    ok(train(mnist, resumed, 2, *EXACT, "--epochs", "1"))
    ok(train(mnist, resumed, 3, *EXACT, "--resume", "auto"))
    assert ledger(resumed) == ledger(kept)
    assert losses(resumed) == pytest.approx(losses(kept), abs=1e-6, rel=0)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--model", "batchnorm"),
        ("--optimizer", "adamw", "--schedule", "cosine"),
        ("--optimizer", "sgd", "--augment"),
        ("--amp",),
        ("--strategy", "dp"),
    ],
    ids=" ".join,
)
def test_every_option_must_train(small, arguments):
    folder = small(*arguments, "--epochs", "3")
    first, *_, last = losses(folder)
    assert last < first


def test_resnet_must_train_on_colour_images(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "TRAIN", 16)
    monkeypatch.setattr(data, "TEST", 8)
    arguments = ("--model", "resnet18", "--dataset", "colours", "--data", str(tmp_path / "d"), "--epochs", "1")
    here(monkeypatch, tmp_path / "job", *arguments, "--augment", "--optimizer", "sgd")
    assert len(losses(tmp_path / "job")) == 1


def test_the_original_cifar_files_must_be_read_from_a_folder(tmp_path, monkeypatch):
    from torchvision.datasets import CIFAR10

    folder = tmp_path / CIFAR10.base_folder
    folder.mkdir()
    names = [name for name, _ in CIFAR10.train_list + CIFAR10.test_list]
    for name in names:
        batch = {"data": (torch.rand(10, 3072) * 255).to(torch.uint8).numpy(), "labels": list(range(10))}
        (folder / name).write_bytes(pickle.dumps(batch))
    (folder / CIFAR10.meta["filename"]).write_bytes(pickle.dumps({"label_names": list("abcdefghij")}))
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *_: True)  # checksums of the originals
    images, labels, test_images, _ = data.load("cifar10", tmp_path, download=False)
    assert (images.shape, images.dtype, len(test_images)) == ((50, 3, 32, 32), torch.uint8, 10)
    assert labels.tolist() == list(range(10)) * 5


def test_dp_on_the_cpu_must_report_what_it_does(small, capsys):
    small("--strategy", "dp")
    assert "dp: DataParallel splits batches over GPUs; on the CPU it has no effect" in capsys.readouterr().out


@pytest.mark.slow
def test_a_strategy_for_one_process_must_refuse_two(mnist, tmp_path):
    done = train(mnist, tmp_path, 2, "--strategy", "single")
    assert done.returncode != 0
    assert "error: --strategy single runs in one process, not 2" in done.stderr


def test_augmented_images_must_be_shifted_independently():
    torch.manual_seed(0)
    images = torch.zeros(64, 1, 28, 28, dtype=torch.uint8)
    images[:, :, 14, 14] = 255
    moved = data.augmented(images)
    places = moved.flatten(1).argmax(1)
    assert moved.shape == images.shape and (moved.flatten(1).sum(1) == 255).all()
    assert len(set(places.tolist())) > 10
    assert (places // 28 - 14).abs().max() <= 2 and (places % 28 - 14).abs().max() <= 2
