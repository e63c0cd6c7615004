"""The app's data, generated digits, MNIST, CIFAR-10 and shards, and its models."""

import json
import resource
import runpy
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.mnist import COUNT
from torch import Tensor, nn
from torch.nn import functional as F

from app import data, shards, train
from app.job import Job
from app.model import build
from app.shards import Shards, assigned

# --- generated datasets


def test_generated_images_must_match_their_version_on_every_machine():
    images, labels = data.digits(500, seed=1)
    coloured = data.colours(500, seed=1)[0].float()
    assert data.VERSION == 1  # increase it with any change, or old caches would be used
    assert labels[:12].tolist() == [5, 9, 4, 8, 3, 3, 1, 1, 9, 2, 8, 9]
    ink = images.float()
    assert (float(ink.mean()), float(ink.std())) == pytest.approx((31.75, 57.26), abs=0.02)
    by_digit = [float(ink[labels == digit].mean()) for digit in range(10)]
    expected = [33.86, 22.75, 33.51, 31.81, 31.85, 33.49, 32.87, 27.83, 36.70, 31.19]
    assert by_digit == pytest.approx(expected, abs=0.02)
    columns, rows = ink.mean((0, 1)), ink.mean((0, 2))
    centre = [float((line * torch.arange(28)).sum() / line.sum()) for line in (columns, rows)]
    assert centre == pytest.approx([13.76, 13.38], abs=0.01)
    assert coloured.mean((0, 2, 3)).tolist() == pytest.approx([126.01, 122.79, 122.39], abs=0.05)
    assert float(coloured.std()) == pytest.approx(58.86, abs=0.05)


def test_the_points_of_a_stroke_must_be_equally_spaced():
    points = data._resampled([(0.0, 0.0), (0.1, 0.0), (0.8, 0.0), (0.8, 0.8)])
    along = points.sum(1)  # the distance along the stroke, which goes right, then down
    assert along.tolist() == pytest.approx(torch.linspace(0, 1.6, 17).tolist())
    assert points[:, 0].max() == pytest.approx(0.8) and points[:8, 1].abs().max() == pytest.approx(0)


def test_coloured_digits_must_have_the_shape_of_cifar_images():
    images, labels = data.colours(40, seed=3)
    digits, same = data.digits(40, seed=3)
    assert (images.shape, images.dtype) == ((40, 3, 32, 32), torch.uint8) and torch.equal(labels, same)
    ink = F.pad(digits, (2, 2, 2, 2))
    for image, mask in zip(images, ink):
        full = image[:, mask == 255]
        assert full.numel() == 0 or (full == full[:, :1]).all()  # ink of one color
        assert (image[:, 0] == image[:, 1]).all()  # the edge shows only paper, constant from top to bottom
    left, right = images[:, :, 0, 0].float(), images[:, :, 0, 31].float()
    assert (left - right).abs().mean() > 30
    assert len({tuple(colour) for colour in left.tolist()}) == 40


class Generator:
    """A generator of a dataset that records its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []

    def __call__(self, count: int, seed: int) -> tuple[Tensor, Tensor]:
        self.calls.append((count, seed))
        return torch.full((2,), float(seed)), torch.tensor([count])


def test_a_data_set_must_be_generated_once_and_then_read_from_the_cache(tmp_path, monkeypatch):
    generator, folder = Generator(), tmp_path / "not" / "there"
    first = data.load_or_draw(generator, folder, "digits")
    again = data.load_or_draw(generator, folder, "digits")
    assert generator.calls == [(data.TRAIN, 1), (data.TEST, 2)] == [(12_000, 1), (2_000, 2)]
    assert [part.tolist() for part in first] == [part.tolist() for part in again]
    assert [path.name for path in folder.iterdir()] == ["digits-1.pt"]
    data.load_or_draw(generator, folder, "colours")
    monkeypatch.setattr(data, "VERSION", 2)
    data.load_or_draw(generator, folder, "digits")
    assert len(generator.calls) == 6


def test_a_data_set_must_be_generated_even_if_it_cannot_be_cached(tmp_path, capsys):
    (tmp_path / "file").touch()
    found = data.load_or_draw(Generator(), tmp_path / "file" / "cache", "digits")
    assert [part.tolist() for part in found] == [[1, 1], [12_000], [2, 2], [2_000]]
    assert "could not cache digits: " in capsys.readouterr().out


def test_a_disk_that_fills_up_while_caching_must_not_end_the_training(tmp_path, capsys):
    _, hard = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        found = data.load_or_draw(Generator(), tmp_path, "digits")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(found) == 4 and "could not cache digits: " in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("cache", "folder"), [("/caches/mine", "/caches/mine"), ("", "/home/me/.cache"), (None, "/home/me/.cache")]
)
def test_data_sets_must_be_cached_in_the_users_cache_folder(monkeypatch, cache, folder):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if cache is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", cache)
    assert str(runpy.run_path(data.__file__)["HOME"]) == f"{folder}/orchestrate"


# --- files


@pytest.mark.parametrize("download", [False, True])
@pytest.mark.parametrize(("name", "kind"), [("mnist", "MNIST"), ("cifar10", "CIFAR10")])
def test_a_data_set_must_be_downloaded_only_on_request(monkeypatch, tmp_path, name, kind, download):
    monkeypatch.setenv("JOB_DIR", str(tmp_path / "job"))
    calls: list[tuple[str, bool, bool]] = []

    class Found:
        data = torch.zeros(4, 28, 28, dtype=torch.uint8)
        targets = [1, 2, 3, 4]

        def __init__(self, folder: str, train: bool, download: bool) -> None:
            calls.append((folder, train, download))

    monkeypatch.setattr(f"torchvision.datasets.{kind}", Found)
    monkeypatch.setattr(sys, "argv", ["train", "--dataset", name, "--data", str(tmp_path), *["--download"] * download])
    samples = train.Samples(Job(), train.arguments())
    assert calls == [(str(tmp_path), True, download), (str(tmp_path), False, download)]
    assert (samples.images.shape, samples.labels.tolist()) == ((4, 1, 28, 28), [1, 2, 3, 4])


@pytest.mark.parametrize(
    ("channels", "mean", "deviation"),
    [(1, [0.1307], [0.3081]), (3, [0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616])],
)
def test_pixels_must_be_normalised_with_the_statistics_of_their_channel(channels, mean, deviation):
    images = torch.full((2, channels, 4, 4), 51, dtype=torch.uint8)  # a fifth
    found = data.normalised(images, torch.float64)
    assert (found.shape, found.dtype, data.normalised(images).dtype) == (images.shape, torch.float64, torch.float32)
    expected = [(0.2 - m) / d for m, d in zip(mean, deviation)]
    assert found[1, :, 3, 2].tolist() == pytest.approx(expected, rel=1e-9)


def test_about_half_of_the_colour_images_and_no_others_must_be_mirrored():
    torch.manual_seed(0)
    grey = torch.zeros(200, 1, 28, 28, dtype=torch.uint8)
    grey[:, :, 10, 6], grey[:, :, 10, 12] = 100, 200  # the darker mark is on the left
    colour = grey.expand(200, 3, 28, 28)

    def left(images: Tensor) -> Tensor:
        """Whether the darker mark is on the left, by image and channel."""
        row = images.amax(2).long()
        return (row == 100).float().argmax(2) < (row == 200).float().argmax(2)

    assert left(data.augmented(grey)).all()
    moved = data.augmented(colour)
    assert 70 < left(moved)[:, 0].sum() < 130
    assert torch.equal(moved[:, 0], moved[:, 1]) and torch.equal(moved[:, 0], moved[:, 2])
    assert (moved.flatten(1).sum(1) == 900).all()  # moved by at most two pixels, so the marks stay inside
    columns = (moved[:, 0].amax(1) == 200).float().argmax(1)
    assert {int(column) for column in columns} == set(range(10, 18))  # 12, or 15 if mirrored, and up to two either way
    rows = (moved[:, 0].amax(2) == 200).float().argmax(1)
    assert {int(row) for row in rows} == set(range(8, 13))


# --- shards


def test_shards_must_be_assigned_evenly_to_workers():
    sizes = {"a": 1, "b": 5, "c": 4, "d": 3, "e": 3}
    assert assigned(sizes, 2) == [["b", "e"], ["c", "d", "a"]]
    assert assigned(dict.fromkeys("cab", 2), 3) == [["a"], ["b"], ["c"]]


@pytest.mark.parametrize("part", ["train", "test"])
def test_each_worker_must_load_the_images_labels_and_ids_of_its_shards(mnist, sharded, part):
    whole = data.load("mnist", mnist, download=False)
    images, labels = whole[:2] if part == "train" else whole[2:]
    parts = [Shards(sharded, part, rank, 3) for rank in range(3)]
    assert sorted(torch.cat([one.ids for one in parts]).tolist()) == list(range(COUNT))
    for rank, one in enumerate(parts):
        assert torch.equal(one.images, images[one.ids]) and torch.equal(one.labels, labels[one.ids])
        assert [part.counts for part in parts] == [[len(part.images) for part in parts]] * 3
        assert one.counts[rank] == len(one.labels) > 0


@pytest.mark.parametrize("cut", ["images", "labels", "index"])
def test_a_shard_that_does_not_match_the_index_must_be_refused(sharded, cut):
    name = "train-00001.safetensors"
    if cut == "index":
        index = json.loads((sharded / "index.json").read_text())
        (sharded / "index.json").write_text(json.dumps(index | {name: index[name] + 1}))
    else:
        tensors = load_file(sharded / name)
        save_file(tensors | {cut: tensors[cut][1:].clone()}, sharded / name)
    with pytest.raises(SystemExit, match=f"error: shard {sharded / name} on rank 0: .* images, but .* in the index"):
        Shards(sharded, "train", 0, 1)


def test_the_requested_number_of_shards_must_be_written_and_never_overwritten(mnist, tmp_path, monkeypatch, capsys):
    arguments = ["shards", str(tmp_path / "out"), "--dataset", "mnist", "--data", str(mnist), "--count", "3"]
    monkeypatch.setattr(sys, "argv", arguments)
    shards.main()
    index = json.loads((tmp_path / "out" / "index.json").read_text())
    assert [*index] == [f"{part}-0000{i}.safetensors" for part in ("train", "test") for i in range(3)]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {*index, "index.json"}
    assert "3 training and 3 test shards in " in capsys.readouterr().out
    with pytest.raises(SystemExit) as refused:
        shards.main()
    assert refused.value.code == 2 and "out already exists" in capsys.readouterr().err


# --- models


@pytest.mark.parametrize(
    ("name", "channels", "side", "parameters"),
    [
        ("lenet", 1, 28, 80_202),
        ("lenet", 3, 32, 117_866),
        ("mnist", 1, 28, 1_199_882),
        ("mnist", 3, 32, 1_626_442),
        ("batchnorm", 1, 28, 225_226),
        ("batchnorm", 3, 32, 315_914),
        ("resnet18", 3, 32, 11_173_962),
    ],
)
def test_a_model_must_have_its_published_size_and_ten_logits(name, channels, side, parameters):
    net = build(name, channels, side)
    assert sum(parameter.numel() for parameter in net.parameters()) == parameters
    assert net(torch.zeros(2, channels, side, side)).shape == (2, 10)


def layers(name: str) -> nn.Sequential:
    """The reference model from its paper or example, layer by layer."""
    if name == "lenet":
        return nn.Sequential(
            nn.Conv2d(1, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(512, 128), nn.ReLU(), nn.Linear(128, 10),
        )  # fmt: skip
    return nn.Sequential(
        nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25),
        nn.Flatten(), nn.Linear(9216, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10),
    )  # fmt: skip


@pytest.mark.parametrize("name", ["lenet", "mnist"])
def test_a_model_must_compute_the_same_as_its_reference(name):
    torch.manual_seed(0)
    net, reference = build(name, 1, 28), layers(name)
    reference.load_state_dict(dict(zip(reference.state_dict(), net.state_dict().values())))
    x = torch.randn(8, 1, 28, 28)
    for training in (False, True):
        results = []
        for model in (net, reference):
            model.train(training)
            torch.manual_seed(1)  # also for dropout
            results.append(model(x))
        assert results[0].allclose(results[1], atol=1e-6)


def test_the_stem_of_resnet_must_keep_the_size_of_small_images():
    net = build("resnet18", 3, 32)
    shapes: list[torch.Size] = []
    net.layer1.register_forward_hook(lambda module, given, result: shapes.append(result.shape))
    net(torch.zeros(2, 3, 32, 32))
    assert shapes == [(2, 64, 32, 32)]
