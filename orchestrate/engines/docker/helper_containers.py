"""Helper containers, with resource limits: they serve the nodes of a job, or inspect its image.

Those that serve nodes run the project's image, never the job's.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from http import HTTPStatus
from pathlib import Path
from typing import Any

from orchestrate.clock import SYSTEM, wait_until
from orchestrate.engines.docker import labels
from orchestrate.engines.docker.api import Refused, errors
from orchestrate.engines.docker.client import Daemon, reason
from orchestrate.errors import EngineError
from orchestrate.plan.container import OOM_SCORE_ADJ
from orchestrate.plan.limits import MIN_PROCESSES
from orchestrate.spec.spec import IMAGE

REMOVAL_TIMEOUT = 2.0  # seconds for the engine to complete a request that was interrupted
ABANDONED_AFTER = 600  # seconds: no command looks into an image for that long


def create(
    daemon: Daemon,
    name: str,
    memory: int,
    processes: int,
    host: dict[str, Any],
    config: dict[str, Any],
    image: str = IMAGE,
    log: str = "1m",
) -> str:
    """Create a helper container and return its id; raises EngineError if its image does not exist.

    `memory` is in bytes; `host` and `config` are the rest of the configuration, in the words of the engine's API; `log`
    is the size of the log, whose end is kept. No image is pulled: in a registry, the name may belong to someone else.
    """
    limits = {
        "CapDrop": ["ALL"],
        "SecurityOpt": ["no-new-privileges:true"],
        "ReadonlyRootfs": True,
        "Memory": memory,
        "MemorySwap": memory,  # including swap
        "OomScoreAdj": OOM_SCORE_ADJ,
        "PidsLimit": processes,
        "LogConfig": {"Type": "json-file", "Config": {"max-size": log}},
    }
    given = {**config, "Image": image, "HostConfig": {**limits, **host}}
    try:
        return str(daemon.api.post("/containers/create", given, name=name)["Id"])
    except Refused as error:
        if error.status_code != HTTPStatus.NOT_FOUND or "No such image" not in error.explanation:
            raise
        raise EngineError(f"the engine has no image {image}; build it with docker compose build") from None


def run(daemon: Daemon, container: str, seconds: float) -> int:
    """Run a container to its end, for which it has `seconds`; return its exit code."""
    daemon.api.post(f"/containers/{container}/start")
    return int(daemon.api.post(f"/containers/{container}/wait", timeout=seconds)["StatusCode"])


def output(
    daemon: Daemon,
    folder: Path,
    command: list[str],
    seconds: int,
    host: dict[str, Any],
    *,
    image: str,
    memory: int,
    config: dict[str, Any],
    log: str = "1m",
) -> tuple[str, str]:
    """Run a command in a container without network; return its stdout, and the error if it could not run.

    The limit is `seconds`. `folder` is for the container's label, `config` as for `create`. Raises EngineError if the
    container cannot be removed.
    """
    name, container, interrupted = f"orchestrate-look-{secrets.token_hex(8)}", "", False
    try:
        container = create(
            daemon,
            name,
            memory,
            MIN_PROCESSES,
            {"NetworkMode": "none", **host},
            {
                "Entrypoint": command[:1],
                "Cmd": command[1:],
                "Labels": labels.only({labels.RUN: str(folder), labels.LOOK: str(os.geteuid())}),
                "Healthcheck": {"Test": ["NONE"]},
                **config,
            },
            image=image,
            log=log,
        )
        _remove_abandoned(daemon, container)
        run(daemon, container, seconds)
        return daemon.api.output(container, stdout=1, stderr=0).decode(errors="replace"), ""
    except errors() as error:
        return "", reason(error)
    except KeyboardInterrupt:
        interrupted = True
        raise
    finally:
        if container or interrupted:
            with daemon.translating_errors("could not remove the container that inspected the image"):
                _remove(daemon, container or name, 0.0 if container else REMOVAL_TIMEOUT)


def _remove(daemon: Daemon, name: str, timeout: float) -> None:
    """Remove a container; the engine may create it only after this process was interrupted in its request for it."""

    def removed() -> bool:
        try:
            daemon.api.remove(name)
            return True
        except Refused as error:
            if error.status_code != HTTPStatus.NOT_FOUND:
                raise
            return False

    wait_until(removed, timeout, SYSTEM, 0.05)


def _remove_abandoned(daemon: Daemon, newest: str) -> None:
    """Remove the containers of this account that a killed process has left: the image may be one that never ends."""
    listed = daemon.api.containers(labels.LOOK)
    now = next((found.attrs["Created"] for found in listed if found.id == newest), 0.0)  # by the engine's clock
    for found in listed:
        if labels.looks(found, os.geteuid()) and found.attrs["Created"] < now - ABANDONED_AFTER:
            with contextlib.suppress(*errors()):
                found.remove()
