"""A checkpoint of 256 MB: how long the step is held, and how long until it is durable."""

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from app.checkpoint import Checkpoints

EVERY, LASTS = 10.0, 20.0  # seconds between two saves of a training, and of the training


def rate(state: dict[str, torch.Tensor], store: Checkpoints | None) -> float:
    """Steps per second of a training, which saves `state` every ten seconds where it has a store."""
    layer, x = torch.nn.Linear(1024, 1024), torch.randn(512, 1024)
    steps, began = 0, time.perf_counter()
    due = began
    while (now := time.perf_counter()) - began < LASTS:
        if store and now >= due:
            store.save(state, int(now))
            due += EVERY
        layer.zero_grad()
        layer(x).square().mean().backward()
        steps += 1
    if store:
        store.wait()
    return steps / (time.perf_counter() - began)


def measure(runs: int) -> dict[str, Any]:
    """Interleaved saves by `torch.save` with fsync, and by ours; the first save of each warms up."""
    state = {str(i): torch.randn(1 << 20) for i in range(64)}
    target = [torch.empty_like(tensor) for tensor in state.values()]
    values: dict[str, list[float]] = {
        name: [] for name in ("memory copy", "torch.save + fsync", "ours: held", "ours: durable")
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
            held = time.perf_counter() - started
            store.wait()
            durable = time.perf_counter() - started
            if step:
                for name, value in zip(values, (copied, plain, held, durable)):
                    values[name].append(value)
        rates: dict[str, list[float]] = {"training": [], "training that saves": []}
        for _ in range(runs):
            rates["training"].append(rate(state, None))
            rates["training that saves"].append(rate(state, store))
    median = {name: statistics.median(times) for name, times in values.items()}
    ratios = {
        "held, in ms (≤ 40)": 1000 * median["ours: held"],
        "durable, in ms (≤ 300)": 1000 * median["ours: durable"],
        "held ÷ memory copy": median["ours: held"] / median["memory copy"],
        "durable ÷ torch.save + fsync": median["ours: durable"] / median["torch.save + fsync"],
    }
    alone, saving = (statistics.median(found) for found in rates.values())
    ratios["throughput with a save every 10 s (≥ 0.99)"] = saving / alone
    found = {name: (times, "s") for name, times in values.items()}
    return {"values": found | {name: (steps, "steps/s") for name, steps in rates.items()}, "ratios": ratios}
