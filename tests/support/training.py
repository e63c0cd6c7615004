"""The app as tests run it, and what it has written."""

import json
import subprocess
import sys
from pathlib import Path

import torch

from app import checkpoint


def command(mnist: Path, *arguments: str) -> list[str]:
    base = [sys.executable, "-m", "app.train", "--dataset", "mnist", "--data", str(mnist), "--batch-size", "32"]
    return [*base, *arguments]


def ok(done: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    assert done.returncode == 0, done.stderr
    return done


def losses(folder: Path) -> list[float]:
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [record["loss"] for record in records if record["kind"] == "step"]


def ledger(folder: Path) -> dict[int, list[int]]:
    """The samples of all workers by step. If a step was repeated after a resume, the last time counts."""
    steps: dict[int, dict[int, dict[str, list[int]]]] = {}
    for path in sorted(folder.glob("ledger-*.jsonl")):
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            generations = steps.setdefault(entry["step"], {})
            generations.setdefault(entry["generation"], {})[path.name] = entry["samples"]
    return {step: sorted(sum(found[max(found)].values(), [])) for step, found in steps.items()}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return checkpoint.load(folder / "checkpoints" / "last")[0]["model"]


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def here(monkeypatch, folder: Path, *arguments: str) -> None:
    """Train in this process."""
    from app import train

    monkeypatch.setenv("JOB_DIR", str(folder))
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(sys, "argv", ["train", *arguments])
    train.main()
