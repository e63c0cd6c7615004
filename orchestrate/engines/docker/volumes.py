"""Volumes of images (VOLUME): folders on the engine's disk that nodes can write to without a limit."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from pathlib import PurePosixPath

from orchestrate.engines.docker.client import Daemon
from orchestrate.engines.docker.mounts import CODE, JOB
from orchestrate.errors import ResourceError
from orchestrate.files.paths import is_text
from orchestrate.spec.folders import mounts
from orchestrate.spec.spec import JobSpec

# Our mounts replace the image's volumes there.
MOUNTED = (CODE, JOB, "/opt/orchestrate", "/run/orchestrate", "/run/secrets", "/tmp")
WIPED = ("/tmp", "/dev/shm", "/dev/mqueue")  # emptied between jobs on a cluster, like the volumes
KERNELS = ("/dev", "/proc", "/sys")
PATH = re.compile(r"/[^\s\0-\x1f\x7f]{,1000}")  # NODE_WIPE is split at spaces
MAX_VOLUMES = 32  # maximum number of volumes of an image


def volumes(daemon: Daemon, image: str, spec: JobSpec) -> list[str]:
    """Return the paths of the image's volumes in nodes; empty if the image does not exist.

    Raises ResourceError for unsupported volumes, such as one with a mount of the job in it: volumes are emptied.
    """
    config = (daemon.image(image) or {}).get("Config") or {}
    return checked(image, config.get("Volumes") or (), given=[mount.target for mount in mounts(spec)])


def checked(
    image: str, declared: Iterable[str], mounted: Collection[str] = MOUNTED, given: Collection[str] = ()
) -> list[str]:
    """Return the volumes of an image, except those that our mounts, or those `given` by the job, replace.

    Raises ResourceError like `volumes`.
    """
    found = []
    for path in declared:
        path = re.sub("^/+", "/", path)  # as Docker reads it
        folder = str(PurePosixPath(path))
        if folder in (*mounted, *given):
            continue
        hint = "remove that VOLUME from its Dockerfile"
        if not (why := _unsupported(path, (*mounted, *KERNELS))):
            why, hint = _unsupported(path, given), "mount the folder elsewhere, with `mounts`"
        if why:
            raise ResourceError(f"the image {image} declares the volume {ascii(path)}, {why}", hint)
        found.append(folder)
    if len(found) > MAX_VOLUMES:
        hint = "declare a common parent folder instead"
        raise ResourceError(f"the image {image} declares {len(found)} volumes; the limit is {MAX_VOLUMES}", hint)
    return sorted(found)


def _unsupported(path: str, taken: Iterable[str]) -> str:
    """Return why a volume is not supported, as a relative clause; empty if it is."""
    if not PATH.fullmatch(path) or not is_text(path) or ".." in PurePosixPath(path).parts:
        return "which is not an absolute path without spaces"
    folder = PurePosixPath(path)
    for other in map(PurePosixPath, taken):
        if folder.is_relative_to(other) or other.is_relative_to(folder):
            return f"which conflicts with {other} of the node"
    return ""
