"""Helper containers, with resource limits: they serve the nodes of a job, or inspect its image.

Those that serve nodes run the project's image, never the job's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import docker.errors
from docker.types import LogConfig

from orchestrate.engines.docker import labels
from orchestrate.engines.docker.client import ERRORS, Daemon, reason
from orchestrate.errors import EngineError
from orchestrate.plan.container import OOM_SCORE_ADJ
from orchestrate.plan.limits import MIN_PROCESSES
from orchestrate.spec.spec import IMAGE


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
    api, container = daemon.client.api, ""
    try:
        container = create(
            daemon,
            memory,
            MIN_PROCESSES,
            {"network_mode": "none", **host},
            image=image,
            entrypoint=command[:1],
            command=command[1:],
            labels=labels.only({labels.RUN: str(run)}),
            healthcheck={"test": ["NONE"]},
            **options,
        )
        api.start(container)
        api.wait(container, timeout=seconds)
        return api.logs(container, stderr=False).decode(errors="replace"), ""
    except ERRORS as error:
        return "", reason(error)
    finally:
        if container:
            with daemon.translating_errors("could not remove the container that inspected the image"):
                api.remove_container(container, force=True, v=True)
