"""A checkpoint of 4 GB of GPU memory: how long it blocks the step, and how long until it is durable."""

import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from app.checkpoint import Checkpoints
from benchmarks import gpu

SIZE, TENSORS = 4 << 30, 256  # bytes in the state, and number of tensors
BUDGET = 80.0  # seconds after which no further round starts
COPY, SAVE = "copy to pinned memory", "torch.save + fsync"
HELD, DURABLE = "ours: blocked", "ours: durable"


def pinned(like: Tensor) -> Tensor:
    """Pinned host memory for a tensor, to which the GPU copies at full bus speed."""
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)


def synchronize() -> None:
    """Wait for the GPU."""
    if gpu.DEVICE == "cuda":
        torch.cuda.synchronize()


def copied(state: dict[str, Tensor], target: dict[str, Tensor]) -> float:
    """Seconds to copy all tensors into allocated memory."""
    synchronize()
    started = time.perf_counter()
    for name, tensor in state.items():
        target[name].copy_(tensor, non_blocking=True)
    synchronize()
    return time.perf_counter() - started


def saved(state: dict[str, Tensor], path: Path) -> float:
    """Seconds until a file written by `torch.save` is durable."""
    synchronize()
    torch.serialization.set_crc32_options(True)  # torch's own default
    started = time.perf_counter()
    with path.open("wb") as file:
        torch.save(state, file)
        os.fsync(file.fileno())
    took = time.perf_counter() - started
    torch.serialization.set_crc32_options(False)
    path.unlink()
    return took


def held(state: dict[str, Tensor], store: Checkpoints, step: int) -> gpu.Figures:
    """Seconds until `save` returns, and until the checkpoint is durable; raises RuntimeError if it was not written."""
    synchronize()
    started = time.perf_counter()
    if not store.save(state, step):
        raise RuntimeError("the previous checkpoint is still being written")
    blocked = time.perf_counter() - started
    store.wait()
    took = time.perf_counter() - started
    if store.misses:
        raise RuntimeError("the checkpoint could not be written")
    return {HELD: blocked, DURABLE: took}


def measure(runs: int) -> dict[str, Any]:
    """Interleave the measurements, after a round that allocates memory; at least one round, more within BUDGET."""
    if (free := shutil.disk_usage(os.getcwd()).free) < 3 * SIZE:
        why = f"needs {3 * SIZE >> 30} GB of free disk space, but {os.getcwd()} has {free >> 30} GB"
        return gpu.result({}, "s", {}, {"gpu-checkpoint": why})
    state = {str(i): torch.randn(SIZE // TENSORS // 4, device=gpu.DEVICE) for i in range(TENSORS)}
    target = {name: pinned(tensor) for name, tensor in state.items()}
    values: gpu.Values = {COPY: [], HELD: [], SAVE: [], DURABLE: []}
    started = time.monotonic()
    with tempfile.TemporaryDirectory(dir=os.getcwd()) as folder:
        store = Checkpoints(Path(folder, "ours"), keep=1)
        copied(state, target)
        held(state, store, 0)
        for step in range(1, runs + 1):
            figures = {COPY: copied(state, target)} | held(state, store, step)
            for name, figure in (figures | {SAVE: saved(state, Path(folder, "plain.pt"))}).items():
                values[name].append(figure)
            if time.monotonic() - started > BUDGET:
                break
    del state, target, store
    if gpu.DEVICE == "cuda":
        torch.cuda.empty_cache()
    ratios = gpu.ratios(
        values, {"blocked ÷ copy (≤ 1.1)": (HELD, COPY), "durable ÷ torch.save + fsync": (DURABLE, SAVE)}
    )
    return gpu.result(values, "s", ratios, {})
