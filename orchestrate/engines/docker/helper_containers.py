"""Helper containers, with resource limits: they serve the nodes of a job, or inspect its image.

Those that serve nodes run the project's image, never the job's.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path
from typing import Any

import docker.errors
from docker.types import LogConfig

from orchestrate.clock import SYSTEM, wait_until
from orchestrate.engines.docker import labels
from orchestrate.engines.docker.client import ERRORS, Daemon, reason
from orchestrate.errors import EngineError
from orchestrate.plan.container import OOM_SCORE_ADJ
from orchestrate.plan.limits import MIN_PROCESSES
from orchestrate.spec.spec import IMAGE

REMOVAL_TIMEOUT = 2.0  # seconds for the engine to complete a request that was interrupted
ABANDONED_AFTER = 600  # seconds: no command looks into an image for that long


def create(
    daemon: Daemon,
    memory: int,
    processes: int,
    host: dict[str, Any],
    image: str = IMAGE,
    log: str = "1m",
    **options: Any,
) -> str:
    """Create a helper container and return its id; raises EngineError if its image does not exist.

    `memory` is in bytes; `host` is the rest of the host configuration; `log` is the size of the log, whose end is kept.
    No image is pulled: in a registry, the name may belong to someone else.
    """
    api = daemon.client.api
    config = api.create_host_config(
        cap_drop=["ALL"],
        security_opt=["no-new-privileges:true"],
        read_only=True,
        mem_limit=memory,
        memswap_limit=memory,  # including swap
        oom_score_adj=OOM_SCORE_ADJ,
        pids_limit=processes,
        log_config=LogConfig(type=LogConfig.types.JSON, config={"max-size": log}),
        **host,
    )
    try:
        return str(api.create_container(image, host_config=config, **options)["Id"])
    except docker.errors.ImageNotFound:
        raise EngineError(f"the engine has no image {image}; build it with docker compose build") from None


def output(
    daemon: Daemon,
    run: Path,
    command: list[str],
    seconds: int,
    host: dict[str, Any],
    *,
    image: str,
    memory: int,
    **options: Any,
) -> tuple[str, str]:
    """Run a command in a container without network; return its stdout, and the error if it could not run.

    The limit is `seconds`. `run` is for the container's label. Raises EngineError if the container cannot be removed.
    """
    api, name = daemon.client.api, f"orchestrate-look-{secrets.token_hex(8)}"
    container, interrupted = "", False
    try:
        container = create(
            daemon,
            memory,
            MIN_PROCESSES,
            {"network_mode": "none", **host},
            image=image,
            name=name,
            entrypoint=command[:1],
            command=command[1:],
            labels=labels.only({labels.RUN: str(run), labels.LOOK: str(os.geteuid())}),
            healthcheck={"test": ["NONE"]},
            **options,
        )
        _remove_abandoned(daemon, container)
        api.start(container)
        api.wait(container, timeout=seconds)
        return api.logs(container, stderr=False).decode(errors="replace"), ""
    except ERRORS as error:
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
        with contextlib.suppress(docker.errors.NotFound):
            daemon.client.api.remove_container(name, force=True, v=True)
            return True
        return False

    wait_until(removed, timeout, SYSTEM, 0.05)


def _remove_abandoned(daemon: Daemon, newest: str) -> None:
    """Remove the containers of this account that a killed process has left: the image may be one that never ends."""
    listed = daemon.client.containers.list(all=True, sparse=True, filters={"label": labels.LOOK})
    now = next((found.attrs["Created"] for found in listed if found.id == newest), 0.0)  # by the engine's clock
    for found in listed:
        if labels.looks(found, os.geteuid()) and found.attrs["Created"] < now - ABANDONED_AFTER:
            with contextlib.suppress(*ERRORS):
                found.remove(force=True, v=True)
