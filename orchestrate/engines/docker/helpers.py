"""Containers that help the nodes of a job, or look into its image: with limits.

What helps a node is of the project's own image, never of the job's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import docker.errors
from docker.types import LogConfig

from orchestrate.engines.docker import labels
from orchestrate.engines.docker.client import ERRORS, Daemon, reason
from orchestrate.errors import EngineError
from orchestrate.job.container import OOM_SCORE_ADJ
from orchestrate.job.limits import MIN_PROCESSES
from orchestrate.job.spec import IMAGE


def create(
    daemon: Daemon,
    memory: int,
    processes: int,
    host: dict[str, Any],
    image: str = IMAGE,
    log: str = "1m",
    **facts: Any,
) -> str:
    """Create a helper and return its id; raises EngineError if the engine does not have its image.

    `memory` is in bytes; `host` is the rest of the host configuration; `log` is the size of the log that the engine
    keeps, of which the end counts. No image is pulled: in a registry, the name may belong to someone else.
    """
    api = daemon.client.api
    config = api.create_host_config(
        cap_drop=["ALL"],
        security_opt=["no-new-privileges:true"],
        read_only=True,
        mem_limit=memory,
        memswap_limit=memory,  # together with swap
        oom_score_adj=OOM_SCORE_ADJ,
        pids_limit=processes,
        log_config=LogConfig(type=LogConfig.types.JSON, config={"max-size": log}),
        **host,
    )
    try:
        return str(api.create_container(image, host_config=config, **facts)["Id"])
    except docker.errors.ImageNotFound:
        raise EngineError(f"the engine has no image {image}; build it with `docker compose build`") from None


def output(
    daemon: Daemon,
    run: Path,
    command: list[str],
    seconds: int,
    host: dict[str, Any],
    *,
    image: str,
    memory: int,
    **facts: Any,
) -> tuple[str, str]:
    """What a command prints to stdout in a container without a network, and why it could not run; at most `seconds`.

    `run` is the folder that nodes will see, for the container's label. Raises EngineError if the container stays.
    """
    api, made = daemon.client.api, ""
    try:
        made = create(
            daemon,
            memory,
            MIN_PROCESSES,
            {"network_mode": "none", **host},
            image=image,
            entrypoint=command[:1],
            command=command[1:],
            labels=labels.only({labels.RUN: str(run)}),
            healthcheck={"test": ["NONE"]},
            **facts,
        )
        api.start(made)
        api.wait(made, timeout=seconds)
        return api.logs(made, stderr=False).decode(errors="replace"), ""
    except ERRORS as error:
        return "", reason(error)
    finally:
        if made:
            with daemon.asking("could not remove the container that looked into the image"):
                api.remove_container(made, force=True, v=True)
