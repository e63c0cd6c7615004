"""Docker configurations with contexts, as `docker context` writes them."""

import hashlib
import json
from pathlib import Path

import pytest

from orchestrate.engines.docker.api import SOCKET, TLS, address
from orchestrate.errors import EngineError

NAMES = ("DOCKER_HOST", "DOCKER_CONTEXT")


def context(folder: Path, name: str, host: str) -> Path:
    """Write a context as `docker context create` does; return its file."""
    path = folder / "contexts" / "meta" / hashlib.sha256(name.encode()).hexdigest() / "meta.json"
    path.parent.mkdir(parents=True)
    endpoints = {"docker": {"Host": host, "SkipTLSVerify": False}}
    path.write_text(json.dumps({"Name": name, "Metadata": {}, "Endpoints": endpoints}))
    return path


@pytest.fixture
def config(tmp_path, monkeypatch):
    """A Docker configuration with two contexts, without the variables that select one."""
    for name in (*NAMES, *TLS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    context(tmp_path, "mine", "unix:///mine.sock")
    context(tmp_path, "other", "unix:///other.sock")
    return tmp_path


HOST = "unix:///host.sock"
CASES = [  # DOCKER_HOST, DOCKER_CONTEXT, currentContext (None: not set), and the expected address
    (None, None, None, SOCKET),
    (HOST, None, None, HOST),
    (HOST, "mine", "other", HOST),
    (HOST, "nope", "nope", HOST),
    (None, "mine", None, "unix:///mine.sock"),
    (None, "mine", "other", "unix:///mine.sock"),
    (None, "default", "other", SOCKET),
    (None, None, "other", "unix:///other.sock"),
    (None, None, "default", SOCKET),
    ("", "", "other", "unix:///other.sock"),
    ("", "mine", "", "unix:///mine.sock"),
    (None, "nope", "other", None),
    (None, None, "nope", None),
]


def configure(config: Path, monkeypatch, host: str | None, name: str | None, current: str | None) -> None:
    """Set DOCKER_HOST and DOCKER_CONTEXT to `host` and `name`, and currentContext to `current`, unless None."""
    for variable, value in zip(NAMES, (host, name)):
        if value is not None:
            monkeypatch.setenv(variable, value)
    if current is not None:
        (config / "config.json").write_text(json.dumps({"currentContext": current}))


def assert_tls_refused(host: str) -> None:
    with pytest.raises(EngineError, match=f"the Docker Engine at {host} uses TLS, which is not supported") as error:
        address()
    assert error.value.hint == f"use its Unix socket: export DOCKER_HOST={SOCKET}"
