"""Containers that help the nodes of a job: of the project's own image, never of the job's, and with limits."""

from __future__ import annotations

from typing import Any

import docker.errors
from docker.types import LogConfig

from orchestrate.engines.daemon import Daemon
from orchestrate.errors import EngineError
from orchestrate.spec import IMAGE


def create(daemon: Daemon, memory: int, processes: int, host: dict[str, Any], **facts: Any) -> str:
    """Make a helper and return its id; raises EngineError where the engine does not have the project's image.

    `memory` is in bytes, and `host` what it has of this machine besides these limits. No image is pulled: in a registry
    this name may be somebody else's.
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
        return str(api.create_container(IMAGE, host_config=config, **facts)["Id"])
    except docker.errors.ImageNotFound:
        raise EngineError(f"the engine has no image {IMAGE}; build it with `docker compose build`") from None
