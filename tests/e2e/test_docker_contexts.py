"""The engine of a job must be the one that the user's `docker` command uses, on a real engine."""

import subprocess

import certifi
import pytest
from support.contexts import CASES, assert_tls_refused, configure

from orchestrate.engines.docker.api import TLS, address


@pytest.mark.docker
@pytest.mark.parametrize(("host", "name", "current", "expected"), CASES)
def test_the_docker_command_must_choose_the_same_engine(
    docker_engine, config, monkeypatch, host, name, current, expected
):
    configure(config, monkeypatch, host, name, current)
    command = ["docker", "context", "inspect", "--format", "{{.Endpoints.docker.Host}}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode == 0, done.stdout.strip()) == (expected is not None, expected or "")


def create_context(name: str, endpoint: str) -> None:
    """Create a context with the `docker` command, which needs no engine."""
    command = ["docker", "context", "create", name, "--docker", endpoint]
    subprocess.run(command, check=True, capture_output=True)


@pytest.mark.docker
@pytest.mark.parametrize("more", [f"ca={certifi.where()}", "skip-tls-verify=true"])
def test_a_context_with_tls_must_be_refused(docker_engine, config, monkeypatch, more):
    create_context("safe", f"host=tcp://localhost:2376,{more}")
    monkeypatch.setenv("DOCKER_CONTEXT", "safe")
    assert_tls_refused("tcp://localhost:2376")


@pytest.mark.docker
@pytest.mark.parametrize("host", ["tcp://localhost:2375", "unix:///mine.sock"])
def test_a_context_without_tls_must_be_accepted(docker_engine, config, monkeypatch, host):
    create_context("plain", f"host={host}")
    monkeypatch.setenv("DOCKER_CONTEXT", "plain")
    for name in TLS:
        monkeypatch.setenv(name, "1")  # applies to $DOCKER_HOST only
    assert address() == host
