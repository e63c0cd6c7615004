"""What a job file may not ask of Docker Swarm; known before anything is asked of the engine."""

from __future__ import annotations

import os
from pathlib import Path

from orchestrate.errors import UsageError
from orchestrate.files.paths import SYSTEM
from orchestrate.spec.spec import JobSpec


def check(spec: JobSpec) -> None:
    """Raise UsageError for the first setting that Swarm does not support."""
    if spec.pin or spec.share_gpus or spec.virtual_local_rank:
        why = "Docker Swarm does not support pin, share_gpus and virtual_local_rank"
        raise UsageError(why, "remove them; use cpus to limit cores")
    if spec.queue:
        raise UsageError("Docker Swarm does not support queue", "remove it: Swarm's tasks wait until GPUs are free")
    if spec.keep:
        raise UsageError("Docker Swarm does not support keep", "use up, which starts nodes that stay up")
    if spec.data or spec.mounts:
        raise UsageError("Docker Swarm does not support data and mounts", "use volume: a folder that all hosts share")
    path = Path("/", os.path.normpath(spec.volume or "").lstrip("/"))
    around = any(path.is_relative_to(folder) or Path(folder).is_relative_to(path) for folder in SYSTEM)
    if (spec.volume or "").startswith("/") and around:
        raise UsageError(f"volume: {spec.volume} cannot be mounted: it is a system folder", "use a folder for data")
    if spec.ports or spec.services or spec.stdin:
        raise UsageError("Docker Swarm does not support ports, services and stdin", "remove them")
    if spec.pip or spec.dockerfile:
        hint = "build an image that contains the packages, push it, and use --image"
        raise UsageError("Docker Swarm does not support pip, requirements and dockerfile", hint)
