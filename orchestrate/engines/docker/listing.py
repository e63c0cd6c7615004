"""Jobs of a Docker Engine or Swarm without Docker's SDK, whose import takes longer than the rest of `ps`."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote, urlsplit

from orchestrate.engines.base import JobState
from orchestrate.engines.docker import labels
from orchestrate.engines.docker.address import address
from orchestrate.errors import OrchestrateError

TIMEOUT = 60.0  # seconds to wait for an answer, as the SDK does
ERRORS = (OrchestrateError, OSError, http.client.HTTPException, ValueError)
ODD = (TypeError, AttributeError, KeyError, RecursionError)  # for another program at that address


class _Connection(http.client.HTTPConnection):
    """A connection to the engine that the user's `docker` command uses."""

    def __init__(self) -> None:
        parts = urlsplit(address())
        super().__init__(parts.hostname or "localhost", parts.port, timeout=TIMEOUT)
        self.path = parts.path if parts.scheme == "unix" else ""

    def connect(self) -> None:
        """Connect; raises OSError."""
        if not self.path:
            return super().connect()
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(TIMEOUT)
        self.sock.connect(self.path)

    def get(self, path: str) -> Any:
        """Return what is at a path of the engine's API; None if it refuses, as an engine outside of a Swarm does.

        Without a version in the path, the engine uses its newest one: https://docs.docker.com/reference/api/engine/.
        """
        self.request("GET", path)
        answer = self.getresponse()
        found = json.loads(answer.read())
        return found if answer.status == http.HTTPStatus.OK else None

    def containers(self, label: str) -> list[Any]:
        """Return the containers with a label, running or not."""
        found = self.get(f"/containers/json?all=1&filters={_filter(label)}")
        return [SimpleNamespace(attrs=attrs) for attrs in found or ()]


def jobs() -> Iterator[JobState]:
    """Yield the jobs that have nodes; none if no engine answers."""
    with contextlib.suppress(*ERRORS, *ODD), contextlib.closing(_Connection()) as engine:
        yield from labels.jobs(engine.containers(labels.JOB))
        if services := engine.get(f"/services?filters={_filter(labels.JOB)}"):
            yield from labels.service_jobs(services, engine.get("/tasks"))


def memory(job_id: str) -> int:
    """Return the bytes of memory of a job's nodes, without cached files, as `docker stats` does; 0 if unknown."""
    found = 0
    with contextlib.suppress(*ERRORS, *ODD), contextlib.closing(_Connection()) as engine:
        for node in engine.containers(f"{labels.JOB}={job_id}"):
            if labels.node(node):
                stats = engine.get(f"/containers/{node.attrs['Id']}/stats?stream=false&one-shot=true") or {}
                used = stats.get("memory_stats") or {}
                found += max(0, used.get("usage", 0) - used.get("stats", {}).get("inactive_file", 0))
    return found


def _filter(label: str) -> str:
    return quote(json.dumps({"label": [label]}))
