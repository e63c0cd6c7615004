"""A small excerpt of MNIST, in its own file format, and a check of a job's files after training."""

import gzip
import json
import struct

import torch

from app import checkpoint, data
from app.model import LeNet


def check_trained(folder, accuracy: float = 0.985) -> None:
    """Check a job's files after training; `accuracy` is the minimum."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    epochs = [record for record in records if record["kind"] == "epoch"]
    assert epochs[-1]["test_accuracy"] >= accuracy
    steps = {record["step"] for record in records if record["kind"] == "step"}
    assert steps == set(range(1, epochs[-1]["step"] + 1))
    (last, manifest), (best, best_manifest) = (
        checkpoint.load(folder / "checkpoints" / name) for name in ("last", "best")
    )
    assert {"model", "optimizer", "scheduler", "scaler", "epoch", "random"} < last.keys()
    assert manifest["step"] == epochs[-1]["step"]
    assert best_manifest["score"] == max(epoch["test_accuracy"] for epoch in epochs)
    LeNet(1, 28).load_state_dict(best["model"])
    plain = torch.load(folder / "checkpoints" / "last" / "state.pt", weights_only=True)
    assert plain.keys() == last.keys()
    assert not list((folder / "checkpoints").glob(".*"))


COUNT = 203  # training samples: not a multiple of anything


def write_mnist(folder, count: int) -> None:
    """Write generated digits in the file format of MNIST."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name, seed in (("train", 1), ("t10k", 2)):
        images, labels = data.digits(count, seed)
        parts = {"images-idx3": (3, images), "labels-idx1": (1, labels.to(torch.uint8))}
        for part, (dimensions, tensor) in parts.items():
            header = struct.pack(f">BBBB{dimensions}I", 0, 0, 8, dimensions, *tensor.shape)
            content = header + tensor.numpy().tobytes()
            (raw / f"{name}-{part}-ubyte").write_bytes(content)
            (raw / f"{name}-{part}-ubyte.gz").write_bytes(gzip.compress(content))
