"""The address of the Docker Engine that the user's `docker` command uses, if it is on this machine."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from orchestrate.errors import EngineError

SOCKET = "unix:///var/run/docker.sock"
DEFAULT = "default"  # the context that always exists
CONTEXT_HINT = "list contexts with docker context ls"
TLS = ("DOCKER_TLS", "DOCKER_TLS_VERIFY")  # for $DOCKER_HOST; contexts have certificate files
LOCAL = (None, "localhost", "127.0.0.1", "::1")


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
