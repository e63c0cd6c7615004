"""Checkpoints that are whole or absent: written under another name, made durable, then renamed."""

import os
from pathlib import Path
from typing import Any

import torch


def save(state: dict[str, Any], path: Path) -> None:
    """Write `state` to `path`; at every moment `path` holds either the old or the new checkpoint, complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)  # the rename itself is durable once the folder is
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def load(path: Path) -> dict[str, Any]:
    """Read a checkpoint to the CPU without running anything that it contains."""
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state
