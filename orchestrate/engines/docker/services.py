"""Services that a job's nodes reach by name: containers of the user's own Compose file on the job's network."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from orchestrate.console import during
from orchestrate.engines.docker import labels
from orchestrate.engines.docker.client import Daemon
from orchestrate.errors import EngineError, EngineLost, ResourceError, UsageError
from orchestrate.host import records, writable
from orchestrate.spec.redact import MARGIN, Mask

if TYPE_CHECKING:
    from docker.models.containers import Container

NETWORK = "orchestrate"  # name of the job's network in the Compose file
SHOWN_LINES, MAX_LINES = 10, 10_000  # of each service: in an error, and in a file
SHOWN_BYTES, MAX_BYTES = 16 << 10, 4 << 20
MAX_PIECE = 16 << 10  # bytes of what the engine takes for a line
SETTLING = 0.5  # seconds in which an engine that is asked for containers has created another one
HOST_PATHS = ("source", "file", "context", "device")  # keys of a Compose file
INSIDE = ("environment", "labels", "command", "entrypoint", "healthcheck")  # what may have them, but means a container


def _end(container: Container, lines: int, most: int, hide: Mask) -> str:
    """Return the last lines of a container's output, and the last bytes of these, without secrets."""
    return hide.last(_last(container, lines, most + MARGIN), most)


def _last(container: Container, lines: int, most: int) -> bytes:
    if container.attrs["Config"]["Tty"]:  # the SDK would read it byte by byte
        return bytes(container.logs(tail=min(lines, most // MAX_PIECE))[-most:])
    kept: deque[bytes] = deque()
    size = 0
    for piece in container.logs(tail=lines, stream=True, follow=False):
        kept.append(piece)
        size += len(piece)
        while size - len(kept[0]) >= most:
            size -= len(kept.popleft())
    return b"".join(kept)[-most:]


def _paths(data: Any) -> Iterator[str]:
    """Yield the paths of this machine in a Compose file: sources of mounts, build contexts, files, and devices."""
    if isinstance(data, list):
        for each in data:
            yield from _paths(each)
    for key, value in data.items() if isinstance(data, dict) else ():
        if key in HOST_PATHS and isinstance(value, str):
            yield from [value] * value.startswith("/")
        elif key not in INSIDE:
            yield from _paths(value)


class Services:
    """The services of one job: a Compose project with its containers, networks and volumes."""

    def __init__(self, daemon: Daemon, job_id: str, file: str, network: str, hide: Mask) -> None:
        """`file` is the Compose file, `network` the name of the job's network, and `hide` masks what is shown."""
        self.daemon, self.job_id, self.file, self.network = daemon, job_id, writable.resolved(file), network
        self.project, self.hide = project(job_id), hide

    @during("starting the services")
    def up(self, stopped: Callable[[], bool]) -> None:
        """Start services that are not running, and wait until all are healthy.

        Raises UsageError for a file that cannot be used, and ResourceError if a service does not start.
        """
        resolved = self._resolved(stopped)
        for path in _paths(resolved):
            writable.resolved(path, fixed=True)  # Docker opens it by its path, also if a job puts a link there
        names = [*resolved["services"]]
        if taken := {*names} & {*labels.ROLES}:
            raise UsageError(
                f"{self.file} has a service {taken.pop()}, which is the name of a node", "rename the service"
            )
        added = {"labels": {labels.SERVICES: self.job_id}, "networks": {NETWORK: {}}}
        document = {
            "services": dict.fromkeys(names, added),
            "networks": {NETWORK: {"name": self.network, "external": True}},
        }
        # A service that runs is kept, even if its file or a variable has changed: it may hold data of the job.
        options = ("--detach", "--wait", "--quiet-pull", "--no-recreate")
        try:
            self._compose(stopped, "up", *options, given=yaml.safe_dump(document))
        except ResourceError:
            if not (done := self._done()):
                raise
            if left := [name for name in names if name not in done]:  # Compose takes the end of a service for a failure
                self._compose(stopped, "up", *options, "--no-deps", *left, given=yaml.safe_dump(document))

    def _resolved(self, stopped: Callable[[], bool]) -> dict[str, Any]:
        """Return the file as Compose reads it, with absolute paths; raises as `up` does."""
        text = self._compose(stopped, "config", "--format", "json")
        found = re.search(r"^\{$.*^\}$", text, re.M | re.S)  # warnings precede it
        return {"services": {}} | (json.loads(found[0]) if found else {})

    def _done(self) -> set[str]:
        """Return the services that have ended, if all have with exit code 0, once the engine creates no others.

        It completes what Compose has asked for, also after Compose has failed.
        """
        found, count = list["Container"](), -1
        with self.daemon.translating_errors("could not list the services"):
            while len(found) != count:
                count = len(found)
                time.sleep(SETTLING)
                found = self._containers()
        ended = [each for each in found if each.status == "exited"]
        failed = any(each.attrs["State"]["ExitCode"] for each in ended)
        return set() if failed else {each.labels["com.docker.compose.service"] for each in ended}

    def failures(self) -> list[str]:
        """Describe the services that have ended with an error."""
        with self.daemon.translating_errors("could not inspect the services"):
            states = {each.name: each.attrs["State"] for each in self._containers()}
        return [
            f"the service {name} has ended with exit code {state['ExitCode']}"
            for name, state in sorted(states.items())
            if state["Status"] == "exited" and state["ExitCode"]
        ]

    def save_logs(self, path: Path) -> None:
        """Write the last lines of each service to a file, without secrets; raises EngineError or OSError."""
        with self.daemon.translating_errors("could not read the output of the services"):
            parts = [f"--- {each.name}\n{_end(each, MAX_LINES, MAX_BYTES, self.hide)}" for each in self._containers()]
        records.put(path, "\n".join(parts))

    def _containers(self) -> list[Container]:
        label = f"{labels.SERVICES}={self.job_id}"
        return self.daemon.client.containers.list(all=True, filters={"label": label})

    def _last_lines(self) -> str:
        """Return the last lines of services that have ended or are unhealthy."""
        lines = []
        with contextlib.suppress(EngineError), self.daemon.translating_errors("could not read their output"):
            for each in self._containers():
                if each.status != "running" or each.attrs["State"].get("Health", {}).get("Status") == "unhealthy":
                    text = _end(each, SHOWN_LINES, SHOWN_BYTES, self.hide)
                    lines += [f"\n    {each.name} | {line}" for line in text.splitlines()]
        return "".join(lines)

    def _compose(self, stopped: Callable[[], bool], *arguments: str, given: str = "") -> str:
        files = ["--file", str(self.file), *(["--file", "-"] if given else [])]
        try:
            return self.daemon.compose(
                *("--project-name", self.project, *files, *arguments),
                folder=self.file.parent,
                given=given,
                capture=True,
                stopped=stopped,
                patience=0.0,
            )
        except EngineLost:
            raise
        except EngineError as error:
            if stopped():
                raise
            hint = f"docker compose --file {shlex.quote(str(self.file))} up starts them without the job"
            why = self.hide(f"{error}{self._last_lines()}")
            raise ResourceError(f"services of {self.file} did not start: {why}", hint) from None


def project(job_id: str) -> str:
    """Return the name of the Compose project of a job's services."""
    return f"{job_id}-services"
