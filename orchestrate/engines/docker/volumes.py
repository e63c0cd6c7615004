"""What an image declares with VOLUME: folders on the engine's disk that nodes may write to, without a limit."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterable
from pathlib import PurePosixPath

import docker.errors

from orchestrate.engines.docker.client import Daemon
from orchestrate.engines.docker.mounts import CODE, JOB
from orchestrate.errors import ResourceError
from orchestrate.files.paths import is_text

MOUNTED = (CODE, JOB, "/opt/orchestrate", "/run/orchestrate", "/tmp")  # a mount of ours replaces the image's volume
WIPED = ("/tmp", "/dev/shm", "/dev/mqueue")  # emptied between two jobs on a cluster, like the volumes
KERNELS = ("/dev", "/proc", "/sys")
PATH = re.compile(r"/[^\s\0-\x1f\x7f]{,1000}")  # NODE_WIPE is split at spaces
MOST = 32  # volumes that an image may declare


def volumes(daemon: Daemon, image: str) -> list[str]:
    """The paths of the image's volumes in nodes; empty if the engine does not have the image.

    Raises ResourceError for volumes that a node cannot have.
    """
    with daemon.asking(f"could not inspect {image}"), contextlib.suppress(docker.errors.ImageNotFound):
        config = daemon.client.images.get(image).attrs.get("Config") or {}
        return checked(image, config.get("Volumes") or ())
    return []


def checked(image: str, declared: Iterable[str], mounted: Collection[str] = MOUNTED) -> list[str]:
    """The volumes of an image, except those that our own mounts replace; raises ResourceError as `volumes` does."""
    found = []
    for path in declared:
        folder = str(PurePosixPath(path))
        if folder in mounted:
            continue
        if why := _refused(path, (*mounted, *KERNELS)):
            hint = "remove that VOLUME from its Dockerfile"
            raise ResourceError(f"the image {image} declares the volume {ascii(path)}, {why}", hint)
        found.append(folder)
    if len(found) > MOST:
        hint = "declare a parent folder of them instead"
        raise ResourceError(f"the image {image} declares {len(found)} volumes; a node can have {MOST}", hint)
    return sorted(found)


def _refused(path: str, taken: Iterable[str]) -> str:
    """Why a node cannot have a volume; empty if it can."""
    if not PATH.fullmatch(path) or not is_text(path) or ".." in PurePosixPath(path).parts:
        return "which is not an absolute path without spaces"
    folder = PurePosixPath(path)
    for other in map(PurePosixPath, taken):
        if folder.is_relative_to(other) or other.is_relative_to(folder):
            return f"but nodes have their own {other}"
    return ""
