"""The app on GPUs must compute the same as on a CPU, and lose nothing when it ends."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from support.mnist import COUNT, write_mnist
from support.on_gpus import ALONE
from support.repo import ROOT
from support.training import ledger, losses, same, weights
from support.waiting import eventually

from app import checkpoint

pytestmark = pytest.mark.gpu
DATA = ("--dataset", "mnist", "--data", "mnist")
APP = ("--", "-m", "app.train", *DATA)
EXACT = ("--dtype", "float64", "--optimizer", "sgd", "--epochs", "2", "--batch-size", "32", "--ledger")
# The model with dropout, whose random number generator must be restored.
RESUMED = ("--deterministic", "--model", "mnist", "--schedule", "cosine", "--epochs", "3", "--batch-size", "32")
SAVED = (*DATA, *RESUMED, "--save-every", "2", "--ledger", "--resume", "auto")


@pytest.fixture
def nodes(gpu_nodes):
    """Running nodes in a folder with the app and some data."""
    if not (gpu_nodes.folder / "mnist").exists():
        shutil.copytree(ROOT / "app", gpu_nodes.folder / "app", ignore=shutil.ignore_patterns("__pycache__"))
        write_mnist(gpu_nodes.folder / "mnist", COUNT)
    return gpu_nodes


def trained(nodes, name: str, *arguments: str) -> Path:
    """Run a job and rename its run directory, with the output as `out` in it; return its job folder."""
    done = nodes.run(*arguments)
    assert done.returncode == 0, done.stderr
    shutil.rmtree(folder := nodes.folder / name, ignore_errors=True)
    shutil.move(nodes.run_dir(), folder)
    (folder / "out").write_text(done.stdout)
    return folder / "job"


def test_losses_on_any_number_of_gpus_must_match_the_cpu_within_a_millionth(nodes):
    cpu = trained(nodes, "cpu", "--trainers", "0", "--gpus", "none", *APP, *EXACT)
    assert len(losses(cpu)) == 14  # 203 samples, 32 at a time, twice
    for options in (ALONE, nodes.pair, ("--trainers", "0", "--gpus", "all")):
        folder = trained(nodes, "gpus", *options, *APP, *EXACT, "--check-replicas", "3")
        assert re.search(r"rank 0 of \d+ on cuda:0$", (folder.parent / "out").read_text(), re.M)
        assert losses(folder) == pytest.approx(losses(cpu), abs=1e-6, rel=0)
        assert ledger(folder) == ledger(cpu)


def test_gradients_sent_through_gloo_must_be_reported(nodes):
    out = (trained(nodes, "pair", *nodes.pair, *APP, "--epochs", "1").parent / "out").read_text()
    slow = len(nodes.gpus) == 1 and torch.cuda.nccl.version() < (2, 30)
    assert (": using gloo" in out) == slow


@pytest.fixture(scope="module")
def plain() -> dict[str, list[float]]:
    """The losses of a training run without any option, by engine."""
    return {}


@pytest.mark.parametrize(
    "options",
    [("--amp", "float16"), ("--amp", "bfloat16"), ("--compile",), ("--compile", "reduce-overhead")],
    ids=" ".join,
)
def test_mixed_precision_and_compile_must_train_equally_well(nodes, plain, options):
    few = ("--epochs", "5", "--batch-size", "29", "--optimizer", "sgd")  # equal batch sizes, so that it compiles once
    if nodes.engine not in plain:
        plain[nodes.engine] = losses(trained(nodes, "plain", *ALONE, *APP, *few))
    found, expected = losses(trained(nodes, "fast", *ALONE, *APP, *few, *options)), plain[nodes.engine]
    assert len(found) == len(expected) == 35
    assert sum(found[-7:]) < 0.6 * sum(found[:7])  # the last epoch and the first
    if "float16" not in options:  # which skips steps until the gradient scale fits
        assert found == pytest.approx(expected, abs=0.15, rel=0)


def test_a_killed_deterministic_run_must_end_with_the_weights_of_an_undisturbed_one(nodes):
    kept = trained(nodes, "kept", *nodes.pair, "--", "-m", "app.train", *SAVED)
    killed = trained(nodes, "killed", *nodes.pair, "--", "killed_training.py", "5", *SAVED)
    report = json.loads((killed.parent / "report.json").read_text())
    assert [(failure["rank"], failure["cause"]) for failure in report["failures"]] == [(1, "killed")]
    assert "resumed after step" in (killed.parent / "out").read_text()
    assert same(weights(killed), weights(kept))
    assert ledger(killed) == ledger(kept)


def test_a_stopped_job_must_save_its_last_step(nodes):
    job = nodes.start_job(*nodes.pair, *APP, "--epochs", "1000000", "--batch-size", "32")
    eventually(lambda: job.has(0, "epoch 2/") or job.ended_early())
    assert nodes("stop", nodes.run_dir().name).returncode == 0
    assert job.end() == 130, job.err
    folder = nodes.run_dir() / "job"
    _, manifest = checkpoint.load(folder / "checkpoints" / "last")
    assert f"stopped by SIGTERM: saved at step {manifest['step']}\n" in nodes.log(0)
    assert len(losses(folder)) == manifest["step"]
    assert eventually(nodes.only_nodes)
