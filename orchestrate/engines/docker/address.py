"""The address of the Docker Engine: the one that the user's `docker` command uses, if it is on this machine."""

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
TLS = ("DOCKER_TLS", "DOCKER_TLS_VERIFY")  # for $DOCKER_HOST; contexts store certificates in files
HERE = (None, "localhost", "127.0.0.1", "::1")


def address() -> str:
    """The engine's address: `$DOCKER_HOST`, else that of `$DOCKER_CONTEXT`, else of the context in Docker's config.

    Raises EngineError for a context that does not exist, for an engine that cannot mount this machine's folders, and
    for one that uses TLS: we would connect without it, and so trust any program that answers.
    """
    found, tls = os.environ.get("DOCKER_HOST", "").strip(), any(map(os.environ.get, TLS))
    if not found:
        found, tls = _of_context()
    hint = "unset DOCKER_HOST and DOCKER_CONTEXT (docker context use default)"
    try:
        parts = urlsplit(found)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise EngineError(f"{found} is not an address of a Docker Engine: {error}", hint) from None
    if parts.scheme == "ssh" or (parts.scheme != "unix" and host not in HERE):
        raise EngineError(
            f"the engine at {found} is another machine, which cannot mount this one's folders",
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


def _of_context() -> tuple[str, bool]:
    """The address of the current context, or the default one, and whether it uses TLS."""
    folder = _folder()
    name = _context(folder)
    if name == DEFAULT:
        return SOCKET, False
    number = hashlib.sha256(os.fsencode(name)).hexdigest()
    try:
        endpoint = _read(folder / "contexts" / "meta" / number / "meta.json")["Endpoints"]["docker"]
        certificates = (folder / "contexts" / "tls" / number).exists()
        return str(endpoint["Host"] or SOCKET), certificates or bool(endpoint.get("SkipTLSVerify"))
    except FileNotFoundError:
        raise EngineError(f"the Docker context {name!r} does not exist", "docker context ls lists them") from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise EngineError(f"cannot read the Docker context {name!r}: {error}", "docker context ls") from None


def _folder() -> Path:
    """The folder of Docker's configuration."""
    return Path(os.environ.get("DOCKER_CONFIG") or os.path.expanduser("~/.docker"))


def _context(folder: Path) -> str:
    """The name of the current context."""
    return os.environ.get("DOCKER_CONTEXT") or _configured(folder) or DEFAULT


def _configured(folder: Path) -> str:
    """The name of the context that was selected with `docker context use`."""
    try:
        name = _read(folder / "config.json")["currentContext"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):  # `docker` ignores a damaged file, too
        return ""
    return name if isinstance(name, str) else ""


def _read(path: Path) -> Any:
    return json.loads(path.read_bytes())
