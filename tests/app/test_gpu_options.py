"""The app's GPU options and code paths, as far as they can be tested without a GPU."""

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.training import losses, same, weights
from torch import Tensor

from app import checkpoint, data, train
from app.checkpoint import Checkpoints, _Copies
from app.job import Job
from app.order import GlobalOrder, ShardOrder
from app.stopwatch import Stopwatch

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def parse(monkeypatch) -> Callable[..., argparse.Namespace]:
    """Parse a command line of the app."""

    def parse(*arguments: str) -> argparse.Namespace:
        monkeypatch.setattr(sys, "argv", ["train", *arguments])
        return train.arguments()

    return parse


@pytest.fixture
def deterministic(monkeypatch) -> Iterator[str]:
    """The option `--deterministic`; its process-wide settings are restored afterwards."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # so that monkeypatch also removes it afterwards
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    yield "--deterministic"
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def job(tmp_path, monkeypatch) -> Job:
    """A job with one worker on the CPU."""
    monkeypatch.setenv("JOB_DIR", str(tmp_path / "job"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("RANK", raising=False)
    return Job()


@pytest.mark.parametrize(
    ("arguments", "amp", "mode"),
    [
        ((), None, None),
        (("--amp", "--compile"), "auto", "default"),
        (("--amp", "float16", "--compile", "reduce-overhead"), "float16", "reduce-overhead"),
        (("--amp", "bfloat16", "--compile", "max-autotune"), "bfloat16", "max-autotune"),
    ],
)
def test_amp_and_compile_must_accept_an_optional_value(parse, arguments, amp, mode):
    args = parse(*arguments)
    assert (args.amp, args.compile, args.deterministic) == (amp, mode, False)


@pytest.mark.parametrize(
    ("option", "value", "other"), [("--amp", "float8", "bfloat16"), ("--compile", "fast", "default")]
)
def test_an_unknown_value_must_be_refused_with_the_choices(parse, capsys, option, value, other):
    with pytest.raises(SystemExit, match="2"):
        parse(option, value)
    (message,) = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
    assert option in message and value in message and other in message


@pytest.mark.parametrize(
    ("amp", "device", "half"),
    [
        ("auto", GPU, torch.float16),
        ("auto", CPU, torch.bfloat16),
        ("bfloat16", GPU, torch.bfloat16),
        ("float16", CPU, torch.float16),
    ],
)
def test_mixed_precision_must_default_to_float16_on_gpus_and_bfloat16_on_cpus(amp, device, half):
    assert train.half_of(amp, device) == half


def test_only_float16_must_scale_the_loss_also_after_a_checkpoint_without_a_scale(small):
    saved = []
    for epochs, amp in enumerate(([], ["--amp", "bfloat16"], ["--amp", "float16"]), 1):
        folder = small("--epochs", str(epochs), "--resume", "auto", "--optimizer", "sgd", *amp)
        saved.append(checkpoint.load(folder / "checkpoints" / "last")[0]["scaler"])
    assert saved[:2] == [{}, {}] and saved[2]["scale"] > 1
    assert losses(folder)[-1] < losses(folder)[0]


def test_a_deterministic_run_resumed_within_an_epoch_must_equal_an_uninterrupted_one(small, tmp_path, deterministic):
    arguments = ("--model", "mnist", "--augment", "--epochs", "2", "--save-every", "3", "--keep", "9", deterministic)
    expected = weights(small(*arguments))
    (tmp_path / "job").rename(tmp_path / "whole")
    first = tmp_path / "whole" / "checkpoints" / "step-00000003"
    resumed = small(*arguments, "--resume", str(first))
    assert same(weights(resumed), expected)
    assert losses(resumed) == losses(tmp_path / "whole")[3:]


@pytest.mark.parametrize("given", [None, ":16:8"])
def test_deterministic_must_apply_to_all_of_torch_and_keep_a_given_cublas_setting(
    small, monkeypatch, deterministic, given
):
    if given:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", given)
    small(deterministic)
    assert torch.are_deterministic_algorithms_enabled() and not torch.backends.cudnn.benchmark
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == (given or ":4096:8")


def test_a_checkpoint_of_a_gpu_must_resume_on_the_cpu_with_new_random_state(small):
    folder = small("--model", "mnist") / "checkpoints"
    state, manifest = checkpoint.load(folder / "last")
    state["random"] = [torch.zeros(16, dtype=torch.uint8)]  # the state of a GPU's generator has 16 bytes
    store = Checkpoints(folder)
    store.save(state, manifest["step"], score=manifest["score"])
    store.wait()
    assert len(losses(small("--model", "mnist", "--resume", "auto", "--epochs", "2"))) == 14


def test_a_stopwatch_must_add_up_the_spans_stopped_since_the_last_read():
    watch = Stopwatch(CPU, iter([1.0, 3.0, 10.0, 20.0, 24.5, 30.0, 31.0]).__next__)
    assert watch.read() == 0
    watch.start()
    watch.stop()
    watch.start()
    watch.start()
    watch.stop()
    assert watch.read() == 2.0 + 4.5
    watch.start()
    watch.stop()
    assert watch.read() == 1.0


def test_a_stopwatch_must_wait_for_a_gpu_only_when_it_is_read(monkeypatch):
    reached = [0]  # the number of the event that the GPU has reached

    class Event:
        """A CUDA event; the GPU takes 250 ms from one to the next."""

        count = 0

        def __init__(self, enable_timing: bool = False) -> None:
            assert enable_timing

        def record(self) -> None:
            Event.count += 1
            self.at = Event.count

        def synchronize(self) -> None:
            reached.append(self.at)

        def elapsed_time(self, end: "Event") -> float:
            assert self.at < end.at <= reached[-1]
            return 250.0 * (end.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    watch = Stopwatch(GPU, iter([]).__next__)
    for _ in range(3):
        watch.start()
        watch.stop()
    assert reached == [0]
    assert watch.read() == 0.75 and reached == [0, 6]
    assert watch.read() == 0 and reached == [0, 6]


def test_image_statistics_must_be_created_once_for_each_device_and_type():
    first = data._statistics(3, torch.float32, CPU)
    assert data._statistics(3, torch.float32, CPU) is first
    others = [(1, torch.float32, CPU), (3, torch.float64, CPU), (3, torch.float32, torch.device("meta"))]
    for channels, dtype, device in others:
        mean, deviation = data._statistics(channels, dtype, device)
        for values in (mean, deviation):
            assert (values.shape, values.dtype, values.device) == ((channels, 1, 1), dtype, device)


@pytest.mark.parametrize("kind", [GlobalOrder, ShardOrder])
def test_a_sample_order_must_be_on_the_device_of_its_samples(kind):
    arguments = (11, 4, 1, 2, 1) if kind is GlobalOrder else ([6, 5], 4, 1, 1)
    on_cpu, on_meta = (list(kind(*arguments, device=device).batches(epoch=1)) for device in ("cpu", "meta"))
    assert {indices.device.type for indices, _ in on_meta} == {"meta"}
    assert [(len(indices), total) for indices, total in on_meta] == [(len(indices), total) for indices, total in on_cpu]


def tensors() -> dict[str, Tensor]:
    """Tensors that are easy to copy wrongly."""
    grid = torch.arange(24.0).view(2, 3, 4)
    return {
        "transposed": grid.transpose(0, 2),
        "every other": grid[:, :, ::2],
        "expanded": torch.ones(1, 3).expand(4, 3),
        "empty": torch.empty(0, 5),
        "scalar": torch.tensor(7),
        "parameter": torch.nn.Parameter(torch.ones(3)),
    }


def test_a_copy_must_equal_the_state_and_share_no_memory_with_it():
    state: dict[str, Any] = {
        "tensors": tensors(),
        "list": [torch.ones(2), 3],
        "tuple": (torch.zeros(2), "text"),
        "none": None,
    }
    copy = _Copies().of(state)
    expected = tensors()
    for name, value in state["tensors"].items():
        assert copy["tensors"][name].is_contiguous() and not copy["tensors"][name].requires_grad
        if name != "expanded":
            value.detach().fill_(-1)
    assert same(copy["tensors"], expected)
    assert copy["list"][0].tolist() == [1, 1] and copy["list"][1] == 3
    assert isinstance(copy["tuple"], tuple) and copy["tuple"][1] == "text" and copy["none"] is None


def test_a_copy_must_reuse_the_memory_of_the_last_one_while_shape_and_type_match():
    copies, state = _Copies(), {"x": torch.ones(4, 2), "y": torch.ones(4)}
    first = copies.of(state)
    addresses = [tensor.data_ptr() for tensor in first.values()]
    state["x"] += 1
    second = copies.of(state)
    assert [tensor.data_ptr() for tensor in second.values()] == addresses and same(second, state)
    for changed in (torch.ones(4, dtype=torch.float64), torch.ones(2, 2, dtype=torch.float64), torch.ones(0)):
        state["y"] = changed
        copy = copies.of(state)
        assert copy["x"].data_ptr() == addresses[0] and copy["y"].dtype == changed.dtype and same(copy, state)


def test_unpinned_memory_must_be_used_with_one_message_if_memory_cannot_be_pinned(monkeypatch, capsys):
    empty = torch.empty

    def fail_if_pinned(*shape: object, pin_memory: bool = False, **options: object) -> Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory\nmore lines")
        return empty(*shape, **options)

    class OnGpu:
        """The attributes of a GPU tensor that are used."""

        is_cuda, shape, dtype = True, (2, 3), torch.float16

    monkeypatch.setattr(torch, "empty", fail_if_pinned)
    copies = _Copies()
    for _ in range(3):
        memory = copies._memory(OnGpu())
        assert (memory.shape, memory.dtype, memory.device) == ((2, 3), torch.float16, CPU)
    assert capsys.readouterr().out == "checkpoints are copied without pinned memory: CUDA error: out of memory\n"


@pytest.mark.parametrize(
    ("device", "shared", "version", "backend"),
    [
        (CPU, "1", (2, 28, 9), "gloo"),
        (GPU, None, (2, 28, 9), "nccl"),
        (GPU, "0", (2, 28, 9), "nccl"),
        (GPU, "1", (2, 28, 9), "gloo"),
        (GPU, "1", (2, 30, 7), "nccl"),
        (GPU, "1", (3, 0, 0, "beta"), "nccl"),
    ],
)
def test_workers_must_use_nccl_unless_they_share_a_gpu_and_nccl_cannot(
    job, monkeypatch, capsys, device, shared, version, backend
):
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE", raising=False)
    if shared:
        monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", shared)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: version)
    job.device = device
    assert job._backend() == backend
    message = "workers share a GPU, which NCCL 2.28 does not support: using gloo\n"
    assert capsys.readouterr().out == (message if device == GPU and backend == "gloo" else "")


def test_a_worker_without_its_own_gpu_must_be_refused_with_a_hint(tmp_path, monkeypatch):
    monkeypatch.setenv("JOB_DIR", str(tmp_path / "job"))
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(SystemExit, match="error: no GPU for local rank 1: torch sees 1\nhint: use fewer workers"):
        Job()
