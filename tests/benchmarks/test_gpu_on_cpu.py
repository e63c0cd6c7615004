"""Each GPU benchmark must run, and measure what it names, on the CPU."""

import re
import sys
import tempfile

import pytest
from support.processes import MARK

from app import data
from benchmarks import (
    gpu,
    gpu_bandwidth,
    gpu_checkpoint,
    gpu_cold_start,
    gpu_restart,
    gpu_steady_state,
    gpu_time_to_accuracy,
)

pytestmark = pytest.mark.exhaustive
TWO = gpu.Group(("--gpus", "none", "--trainers", "1"), "gloo", 2, "2 ranks on the CPU")


@pytest.fixture
def on_cpu(tmp_path, monkeypatch, nothing_left):
    """Run the benchmarks on the CPU, with all files in the test's folder."""
    monkeypatch.setenv(MARK, str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gpu, "DEVICE", "cpu")
    monkeypatch.setattr(gpu, "ONE", ("--gpus", "none"))
    monkeypatch.setattr(gpu, "ALL", ("--gpus", "none"))
    monkeypatch.setattr(gpu, "group", lambda: TWO)


@pytest.fixture
def small_data(mnist, monkeypatch):
    """Arguments that make the app train on a few images; digits are not generated."""
    monkeypatch.setattr(data, "load", lambda *_, **__: [])
    return "--dataset", "mnist", "--data", str(mnist)


# --- each benchmark, on the CPU


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "base"), [(1, "python"), (2, "torchrun")])
def test_a_start_must_be_measured_in_all_its_phases(on_cpu, monkeypatch, workers, base):
    monkeypatch.setattr(gpu, "count", lambda: workers)
    monkeypatch.setattr(gpu, "ALL", ("--gpus", "none", "--nproc-per-node", str(workers)))
    result = gpu_cold_start.measure(1)
    parts = ("", ": import torch", ": CUDA context", ": NCCL init")
    assert result["failed"] == {}
    assert list(result["values"]) == [
        f"{name}{part}" for name in (base, gpu_cold_start.COLD, gpu_cold_start.WARM) for part in parts
    ]
    assert set(result["ratios"]) == {f"orchestrate ÷ {base}", f"on a cluster ÷ {base}"}


@pytest.mark.slow
def test_restarts_must_be_measured_for_every_kill(on_cpu, monkeypatch):
    monkeypatch.setattr(gpu_restart, "KILLS", 2)
    monkeypatch.setattr("benchmarks.restart.RESTART_TIMEOUT", 300.0)  # this machine may be busy
    monkeypatch.setattr(gpu, "TORCHRUN", [sys.executable, "-c", "raise SystemExit(1)"])  # one that loses its job
    result = gpu_restart.measure(1)
    ((seconds, unit),) = result["values"].values()
    assert (len(seconds), unit, min(seconds) > 0) == (2, "s", True)
    assert result["ratios"]["jobs lost in 2 kills (≤ 0)"] == 0.0
    assert result["ratios"]["jobs lost by torchrun in 1 kills"] == 1.0
    assert result["failed"]["torchrun"] == "no worker was restarted"


@pytest.mark.slow
def test_samples_per_second_must_be_measured_under_every_launcher(on_cpu, monkeypatch, small_data):
    monkeypatch.setattr(gpu_steady_state, "EPOCHS", {"lenet": 2, "mnist": 3})
    monkeypatch.setattr(gpu_steady_state, "ARGUMENTS", (*gpu_steady_state.ARGUMENTS, *small_data))
    result = gpu_steady_state.measure(1)
    models, launchers = ("lenet", "mnist"), ("python", "torchrun", "orchestrate")
    assert set(result["values"]) == {f"{model}: {name}" for model in models for name in launchers}
    assert set(result["ratios"]) == {
        f"{model}: orchestrate ÷ {name} (≥ 0.99)" for model in models for name in launchers[:2]
    }


@pytest.mark.slow
def test_time_to_accuracy_must_be_measured_with_and_without_running_nodes(on_cpu, monkeypatch, small_data):
    monkeypatch.setattr(gpu, "HAS_TORCHVISION", False)
    monkeypatch.setattr(gpu_time_to_accuracy, "GOAL", 0.0)
    monkeypatch.setattr(gpu_time_to_accuracy, "ARGUMENTS", (*gpu_time_to_accuracy.ARGUMENTS, *small_data))
    result = gpu_time_to_accuracy.measure(1)
    assert list(result["values"]) == [
        f"{name}, digits"
        for name in (gpu_time_to_accuracy.COLD, gpu_time_to_accuracy.WARM, gpu_time_to_accuracy.TRAINING)
    ]
    assert set(result["ratios"]) == {"on a cluster, in seconds (≤ 5)", "training only, in seconds (≤ 2)"}
    assert result["failed"] == {gpu_time_to_accuracy.PEER: "the Python package torchvision is missing"}


def test_the_comparison_script_must_train_on_the_given_device(mnist, monkeypatch, capsys):
    from benchmarks import mnist as script

    tensors = data.load("mnist", mnist, download=False)
    monkeypatch.setattr(data, "load", lambda *_, **__: tensors)
    monkeypatch.setattr(script, "EPOCHS", 1)
    script.main("mnist", 1, "cpu")
    assert re.fullmatch(r"epoch 1/1: accuracy [\d.]+%\n", capsys.readouterr().out)
    with pytest.raises(RuntimeError, match="(?i)meta"):  # computing the loss fails on a device without data
        script.main("mnist", 1, "meta")


def test_a_checkpoint_must_be_measured_until_it_is_durable(on_cpu, monkeypatch):
    monkeypatch.setattr(gpu_checkpoint, "SIZE", 1 << 22)
    monkeypatch.setattr(gpu_checkpoint, "TENSORS", 4)
    monkeypatch.setattr(gpu_checkpoint, "pinned", lambda tensor: tensor.clone())  # pinning needs a GPU
    result = gpu_checkpoint.measure(2)
    assert {name: len(values) for name, (values, _) in result["values"].items()} == dict.fromkeys(
        (gpu_checkpoint.COPY, gpu_checkpoint.HELD, gpu_checkpoint.SAVE, gpu_checkpoint.DURABLE), 2
    )
    assert all(
        held < durable
        for held, durable in zip(result["values"][gpu_checkpoint.HELD][0], result["values"][gpu_checkpoint.DURABLE][0])
    )


@pytest.mark.slow
def test_the_bandwidth_must_be_measured_for_every_size(on_cpu, monkeypatch):
    monkeypatch.setattr(gpu_bandwidth, "LARGEST", {"gloo": 1 << 14})
    result = gpu_bandwidth.measure(2)
    assert list(result["values"]) == [f"2 ranks on the CPU: {size} KB" for size in (1, 4, 16)]
    assert all(len(rates) == 2 and min(rates) > 0 and unit == "GB/s" for rates, unit in result["values"].values())
