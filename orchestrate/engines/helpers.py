"""Containers that help the nodes of a job, or look into its image: with limits.

What helps a node is of the project's own image, never of the job's.
"""

from __future__ import annotations

from typing import Any

import docker.errors
from docker.types import LogConfig

from orchestrate.engines.daemon import Daemon
from orchestrate.errors import EngineError
from orchestrate.spec import IMAGE


def create(daemon: Daemon, memory: int, processes: int, host: dict[str, Any], image: str = IMAGE, **facts: Any) -> str:
    """Create a helper and return its id; raises EngineError if the engine does not have its image.

    `memory` is in bytes; `host` is the rest of the host configuration. No image is pulled: in a registry, the name may
    belong to someone else.
    """
    api = daemon.client.api
    config = api.create_host_config(
        cap_drop=["ALL"],
        security_opt=["no-new-privileges:true"],
        read_only=True,
        mem_limit=memory,
        memswap_limit=memory,  # together with swap
        oom_score_adj=500,  # as nodes have
        pids_limit=processes,
        log_config=LogConfig(type=LogConfig.types.JSON, config={"max-size": "1m"}),
        **host,
    )
    try:
        return str(api.create_container(image, host_config=config, **facts)["Id"])
    except docker.errors.ImageNotFound:
        raise EngineError(f"the engine has no image {image}; build it with `docker compose build`") from None
