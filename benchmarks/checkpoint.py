"""A checkpoint of 256 MB: how long it blocks the step, and how long until it is durable."""

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from app.checkpoint import Checkpoints

SAVE_EVERY, DURATION = 10.0, 20.0  # seconds between two saves, and of a training


def rate(state: dict[str, torch.Tensor], store: Checkpoints | None) -> float:
    """Steps per second of a training, which saves `state` every `SAVE_EVERY` seconds if it has a store."""
    layer, x = torch.nn.Linear(1024, 1024), torch.randn(512, 1024)
    steps, started = 0, time.perf_counter()
    due = started
    while (now := time.perf_counter()) - started < DURATION:
        if store and now >= due:
            store.save(state, int(now))
            due += SAVE_EVERY
        layer.zero_grad()
        layer(x).square().mean().backward()
        steps += 1
    if store:
        store.wait()
    return steps / (time.perf_counter() - started)


def measure(runs: int) -> dict[str, Any]:
    """Interleave `torch.save` plus fsync with our saves; the first save of each is a warm-up."""
    state = {str(i): torch.randn(1 << 20) for i in range(64)}
    target = [torch.empty_like(tensor) for tensor in state.values()]
    values: dict[str, list[float]] = {
        name: [] for name in ("memory copy", "torch.save + fsync", "ours: blocked", "ours: durable")
    }
    with tempfile.TemporaryDirectory(dir=os.getcwd()) as folder:
        store = Checkpoints(Path(folder) / "ours", keep=1)
        for step in range(runs + 1):
            started = time.perf_counter()
            for tensor, source in zip(target, state.values()):
                tensor.copy_(source)
            copied = time.perf_counter() - started

            torch.serialization.set_crc32_options(True)  # torch's own default
            started = time.perf_counter()
            with (Path(folder) / "plain.pt").open("wb") as file:
                torch.save(state, file)
                os.fsync(file.fileno())
            plain = time.perf_counter() - started
            torch.serialization.set_crc32_options(False)

            started = time.perf_counter()
            store.save(state, step)
            blocked = time.perf_counter() - started
            store.wait()
            durable = time.perf_counter() - started
            if step:
                for name, value in zip(values, (copied, plain, blocked, durable)):
                    values[name].append(value)
        rates: dict[str, list[float]] = {"training": [], "training with saves": []}
        for _ in range(runs):
            rates["training"].append(rate(state, None))
            rates["training with saves"].append(rate(state, store))
    median = {name: statistics.median(times) for name, times in values.items()}
    ratios = {
        "blocked, in ms (≤ 40)": 1000 * median["ours: blocked"],
        "durable, in ms": 1000 * median["ours: durable"],
        "blocked ÷ memory copy (≤ 1.0)": median["ours: blocked"] / median["memory copy"],
        "durable ÷ torch.save + fsync (≤ 1.0)": median["ours: durable"] / median["torch.save + fsync"],
    }
    alone, saving = (statistics.median(found) for found in rates.values())
    ratios["throughput with a save every 10 s (≥ 0.98)"] = saving / alone
    found = {name: (times, "s") for name, times in values.items()}
    return {"values": found | {name: (steps, "steps/s") for name, steps in rates.items()}, "ratios": ratios}
