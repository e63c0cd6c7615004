"""The app as a user starts it without orchestrate: as a process, with its own launcher, and under torchrun."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.mnist import COUNT, write_mnist
from support.ports import free_port
from support.repo import ROOT
from support.training import command, ledger, losses, ok

from app import shards


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.exhaustive)])  # 0: two of the strategies
def test_compare_must_put_the_strategies_side_by_side(mnist, tmp_path, workers):
    expected = (
        [("single", 1), ("dp", 1), ("manual", workers), ("ddp", workers)] if workers else [("single", 1), ("ddp", 1)]
    )
    selected = ["--workers", str(workers)] if workers else ["--workers", "1", "--strategies", "single", "ddp"]
    tail = command(mnist, "--epochs", "1", "--dtype", "float64")[3:]
    script = [sys.executable, "-m", "app.compare", *selected, "--out", str(tmp_path), "--", *tail]
    done = ok(subprocess.run(script, cwd=ROOT, capture_output=True, text=True, timeout=300))
    rows = json.loads((tmp_path / "results.json").read_text())
    assert [(row["strategy"], row["workers"]) for row in rows] == expected
    assert all(row["losses"] == pytest.approx(rows[0]["losses"], abs=1e-6, rel=0) for row in rows)
    assert done.stdout == (tmp_path / "table.md").read_text()
    assert done.stdout.splitlines()[0] == "| strategy | workers | seconds | samples/s | accuracy | speed-up |"
    assert (tmp_path / "speed.svg").read_text().count("<rect") == len(rows)


def run(mnist: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the app on the CPU, as a user starts it."""
    env = {key: value for key, value in os.environ.items() if key != "RANK"}
    env |= {"JOB_DIR": str(folder), "CUDA_VISIBLE_DEVICES": ""}  # more workers than a machine may have GPUs
    return subprocess.run(command(mnist, *arguments), cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_training_from_shards_must_see_each_sample_once_and_each_worker_only_its_own(mnist, sharded, tmp_path):
    ok(run(mnist, tmp_path, "--spawn", "3", "--dataset", f"shards:{sharded}", "--epochs", "1", "--ledger"))
    seen = ledger(tmp_path)
    assert sorted(sample for samples in seen.values() for sample in samples) == list(range(COUNT))
    for rank in range(3):
        entries = map(json.loads, (tmp_path / f"ledger-{rank}.jsonl").read_text().splitlines())
        own = {sample for entry in entries for sample in entry["samples"]}
        assert own == set(shards.Shards(sharded, "train", rank, 3).ids.tolist())


@pytest.mark.slow
def test_the_app_must_run_under_torchrun(mnist, tmp_path):
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        str(free_port()),
        "-m",
    ]
    arguments = command(mnist, "--epochs", "1")[2:]
    env = os.environ | {"JOB_DIR": str(tmp_path), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    ok(subprocess.run([*torchrun, *arguments], cwd=ROOT, env=env, capture_output=True, text=True, timeout=300))
    assert len(losses(tmp_path)) == 7


def train(tmp_path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Train in one process, without orchestrate."""
    return subprocess.run(
        [sys.executable, "-m", "app.train", "--data", str(tmp_path), *arguments],
        cwd=ROOT,
        env={key: value for key, value in os.environ.items() if key != "RANK"} | {"JOB_DIR": str(tmp_path / "job")},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_the_original_mnist_files_must_be_read_from_a_folder(tmp_path):
    write_mnist(tmp_path, 500)
    done = train(tmp_path, "--dataset", "mnist", "--epochs", "1")
    assert done.returncode == 0, done.stderr
    (record,) = [line for line in (tmp_path / "job" / "metrics.jsonl").read_text().splitlines() if "epoch" in line][-1:]
    assert json.loads(record)["step"] == 4  # 500 images, 128 at a time


def test_a_folder_without_mnist_must_be_refused_without_a_download(tmp_path):
    done = train(tmp_path, "--dataset", "mnist")
    assert done.returncode == 1
    assert f"error: no mnist in {tmp_path}: Dataset not found" in done.stderr
    assert "hint: set --data to the folder" in done.stderr
