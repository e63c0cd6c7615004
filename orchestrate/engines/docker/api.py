"""The address of the Docker Engine that the user's `docker` command uses, and its API over HTTP.

That is for what every job asks of it: importing Docker's SDK takes a tenth of a second.

Paths and content are those of https://docs.docker.com/reference/api/engine/; without a version in the path, the engine
uses its newest one.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from orchestrate.errors import EngineError

SOCKET = "unix:///var/run/docker.sock"
DEFAULT = "default"  # the context that always exists
CONTEXT_HINT = "list contexts with docker context ls"
TLS = ("DOCKER_TLS", "DOCKER_TLS_VERIFY")  # for $DOCKER_HOST; contexts have certificate files
LOCAL = (None, "localhost", "127.0.0.1", "::1")
PORT = 2375  # of `tcp://localhost`
TIMEOUT = 60.0  # seconds to wait for an answer, as the SDK does
NO_CHANGE = http.HTTPStatus.NOT_MODIFIED  # a container that is to be started runs, for example


class Refused(Exception):
    """The engine refuses a request."""

    def __init__(self, status_code: int, explanation: str) -> None:
        super().__init__(explanation)
        self.status_code, self.explanation = status_code, explanation


class Unreachable(Exception):
    """The engine does not answer, or the answer is cut off."""


def refusals() -> tuple[type[Exception], ...]:
    """Return what is raised for a request that the engine refuses, also by the SDK once it is imported."""
    sdk = sys.modules.get("docker.errors")
    return (Refused, *([sdk.APIError] if sdk else []))


def errors() -> tuple[type[Exception], ...]:
    """Return all that is raised for requests to the engine, also by the SDK once it is imported."""
    if "docker" not in sys.modules:
        return Refused, Unreachable
    import docker.errors
    import requests
    import urllib3.exceptions

    # The last is for an answer that is cut off.
    return Refused, Unreachable, docker.errors.DockerException, requests.RequestException, urllib3.exceptions.HTTPError


class _Connection(http.client.HTTPConnection):
    def __init__(self, host: str, timeout: float | None) -> None:
        self.path = socket_of(host)
        parts = urlsplit("" if self.path else host)
        super().__init__(parts.hostname or "localhost", parts.port or PORT, timeout=timeout)

    def connect(self) -> None:
        if not self.path:
            return super().connect()
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.path)


class Api:
    """The API of the engine at an address. All methods raise Refused or Unreachable."""

    def __init__(self, host: str) -> None:
        self.host = host

    def get(self, path: str, **query: Any) -> Any:
        """Return what is at a path; values of `query` that are no text or numbers are sent as JSON."""
        return self._request("GET", path, query)

    def post(self, path: str, content: Any = None, timeout: float = TIMEOUT, **query: Any) -> Any:
        """Send an order with its content, as JSON; return the answer, which must come within `timeout` seconds."""
        return self._request("POST", path, query, content, timeout)

    def delete(self, path: str, **query: Any) -> None:
        """Remove what is at a path."""
        self._request("DELETE", path, query)

    def containers(self, label: str) -> list[Container]:
        """Return the containers with a label, running or not."""
        return [Container(self, attrs) for attrs in self.get("/containers/json", all=1, filters={"label": [label]})]

    def remove(self, container: str) -> None:
        """Remove a container, running or not, and its anonymous volumes."""
        self.delete(f"/containers/{container}", force="true", v="true")

    def output(self, container: str, **query: Any) -> bytes:
        """Return the output of a container without a terminal, as `query` selects it."""
        with self._answer("GET", f"/containers/{container}/logs", query) as (answer, _):
            return b"".join(text for _, text in frames(answer.read()))

    @contextlib.contextmanager
    def events(self, **query: Any) -> Iterator[tuple[Iterator[Any], socket.socket]]:
        """Yield the engine's events as they happen, and the socket, whose shutdown ends them."""
        with self._answer("GET", "/events", query, timeout=None) as (answer, sock):
            yield (json.loads(line) for line in answer), sock

    def _request(
        self, method: str, path: str, query: dict[str, Any], content: Any = None, timeout: float = TIMEOUT
    ) -> Any:
        with self._answer(method, path, query, content, timeout) as (answer, _):
            text = answer.read()
            return json.loads(text) if text.strip() else None

    @contextlib.contextmanager
    def _answer(
        self, method: str, path: str, query: dict[str, Any], content: Any = None, timeout: float | None = TIMEOUT
    ) -> Iterator[tuple[http.client.HTTPResponse, socket.socket]]:
        values = {key: value if isinstance(value, (str, int)) else json.dumps(value) for key, value in query.items()}
        body = None if content is None else json.dumps(content)
        try:
            target = quote(path, safe="/:@") + ("?" + urlencode(values) if values else "")
            with contextlib.closing(_Connection(self.host, timeout)) as connection:
                connection.request(method, target, body, {"Content-Type": "application/json"} if body else {})
                sock = connection.sock
                with connection.getresponse() as answer:
                    if answer.status >= http.HTTPStatus.MULTIPLE_CHOICES and answer.status != NO_CHANGE:
                        raise Refused(answer.status, _explanation(answer.read()) or answer.reason)
                    yield answer, sock
        except (OSError, http.client.HTTPException, ValueError, RecursionError) as error:
            raise Unreachable(str(error) or type(error).__name__) from None


class Container:
    """A container, as the engine lists it; its methods raise Refused or Unreachable."""

    def __init__(self, api: Api, attrs: dict[str, Any]) -> None:
        self.api, self.attrs = api, attrs
        self.id, self.status = str(attrs["Id"]), str(attrs["State"])
        self.short_id = self.id[:12]

    def start(self) -> None:
        """Start it."""
        self.api.post(f"/containers/{self.id}/start")

    def kill(self) -> None:
        """Send it SIGKILL."""
        self.api.post(f"/containers/{self.id}/kill")

    def unpause(self) -> None:
        """Let it continue."""
        self.api.post(f"/containers/{self.id}/unpause")

    def stop(self, timeout: int) -> None:
        """Stop it: its process 1 gets `timeout` seconds to end."""
        self.api.post(f"/containers/{self.id}/stop", timeout=TIMEOUT + timeout, t=timeout)

    def remove(self) -> None:
        """Remove it, running or not, and its anonymous volumes."""
        self.api.remove(self.id)


def socket_of(host: str) -> str:
    """Return the path of the engine's socket; empty for an address with a port."""
    return host.removeprefix("unix://") or SOCKET.removeprefix("unix://") if host.startswith("unix://") else ""


def frames(text: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the complete frames in which the engine sends output: the number of the stream, and its data."""
    at = 0
    while len(text) >= (begin := at + 8) and len(text) >= (end := begin + int.from_bytes(text[at + 4 : begin], "big")):
        yield text[at], text[begin:end]
        at = end


def _explanation(text: bytes) -> str:
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return str(json.loads(text)["message"])
    return text.decode(errors="replace")


def address() -> str:
    """Return the engine's address: `$DOCKER_HOST`, or from `$DOCKER_CONTEXT` or the context in Docker's config.

    Raises EngineError if the context does not exist, if the engine cannot mount this machine's folders, or if it uses
    TLS: we would connect without TLS, and so trust any program that answers.
    """
    found, tls = os.environ.get("DOCKER_HOST", "").strip(), any(map(os.environ.get, TLS))
    if not found:
        found, tls = _from_context()
    hint = "unset DOCKER_HOST and DOCKER_CONTEXT (docker context use default)"
    try:
        parts = urlsplit(found)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise EngineError(f"{found} is not an address of a Docker Engine: {error}", hint) from None
    if parts.scheme == "ssh" or (parts.scheme != "unix" and host not in LOCAL):
        raise EngineError(
            f"the engine at {found} is on another machine and cannot mount local folders",
            f"run orchestrate there, or {hint}",
        )
    if parts.scheme not in ("unix", "tcp") or port == 0:
        raise EngineError(f"{found} is not an address of a Docker Engine (unix://PATH or tcp://localhost:PORT)", hint)
    if parts.scheme == "tcp" and tls:
        raise EngineError(
            f"the Docker Engine at {found} uses TLS, which is not supported",
            f"use its Unix socket: export DOCKER_HOST={SOCKET}",
        )
    return found


def _from_context() -> tuple[str, bool]:
    """Return the address of the current context, or the default one, and whether it uses TLS."""
    folder = _folder()
    name = _context(folder)
    if name == DEFAULT:
        return SOCKET, False
    digest = hashlib.sha256(os.fsencode(name)).hexdigest()
    try:
        endpoint = _read(folder / "contexts" / "meta" / digest / "meta.json")["Endpoints"]["docker"]
        certificates = (folder / "contexts" / "tls" / digest).exists()
        return str(endpoint["Host"] or SOCKET), certificates or bool(endpoint.get("SkipTLSVerify"))
    except FileNotFoundError:
        raise EngineError(f"the Docker context {name!r} does not exist", CONTEXT_HINT) from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise EngineError(f"cannot read the Docker context {name!r}: {error}", CONTEXT_HINT) from None


def _folder() -> Path:
    """Return the folder of Docker's configuration."""
    return Path(os.environ.get("DOCKER_CONFIG") or os.path.expanduser("~/.docker"))


def _context(folder: Path) -> str:
    """Return the name of the current context."""
    return os.environ.get("DOCKER_CONTEXT") or _configured(folder) or DEFAULT


def _configured(folder: Path) -> str:
    """Return the name of the context that was selected with `docker context use`."""
    try:
        name = _read(folder / "config.json")["currentContext"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):  # `docker` also ignores a damaged file
        return ""
    return name if isinstance(name, str) else ""


def _read(path: Path) -> Any:
    return json.loads(path.read_bytes())
