"""Jobs of a Docker Engine or Swarm, as `ps` and others show them: none if no engine answers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from orchestrate.engines.base import JobState
from orchestrate.engines.docker import labels
from orchestrate.engines.docker.api import Api, Refused, Unreachable, address
from orchestrate.errors import OrchestrateError

ERRORS = (OrchestrateError, Refused, Unreachable)
ODD = (TypeError, AttributeError, KeyError, RecursionError)  # for another program at that address


def jobs() -> Iterator[JobState]:
    """Yield the jobs that have nodes; none if no engine answers."""
    with contextlib.suppress(*ERRORS, *ODD):
        api = Api(address())
        yield from labels.jobs(api.containers(labels.JOB))
        if services := api.get("/services", filters={"label": [labels.JOB]}):  # refused outside of a Swarm
            yield from labels.service_jobs(services, api.get("/tasks"))


def memory(job_id: str) -> int:
    """Return the bytes of memory of a job's nodes, without cached files, as `docker stats` does; 0 if unknown."""
    found = 0
    with contextlib.suppress(*ERRORS, *ODD):
        api = Api(address())
        for node in api.containers(f"{labels.JOB}={job_id}"):
            if labels.node(node):
                with contextlib.suppress(Refused):  # it has ended meanwhile
                    stats = api.get(f"/containers/{node.id}/stats", stream="false", **{"one-shot": "true"})
                    used = stats.get("memory_stats") or {}
                    found += max(0, used.get("usage", 0) - used.get("stats", {}).get("inactive_file", 0))
    return found
