"""Requests to an engine that is a manager, or is not."""

import os

import pytest
from support.leftovers import docker

from orchestrate.engines.docker.client import Daemon
from orchestrate.engines.swarm.manager import Manager
from orchestrate.errors import EngineError


@pytest.mark.docker
def test_a_network_must_be_found_by_its_exact_name(docker_engine, tmp_path):
    name = f"a-host-{tmp_path.name}-{os.getpid()}"
    docker("network", "create", name)
    try:
        assert Daemon().network("host")["Name"] == "host" and not Daemon().network("hos")
    finally:
        docker("network", "rm", name)


@pytest.mark.parametrize(
    ("swarm", "message"),
    [
        ({"ControlAvailable": False, "LocalNodeState": "active"}, "is not a Swarm manager"),
        ({"ControlAvailable": False, "LocalNodeState": "inactive"}, "is not part of a Swarm"),
        ({}, "is not part of a Swarm"),
    ],
)
def test_an_engine_that_is_not_a_swarm_manager_must_be_reported(stub, swarm, message):
    stub.info["Swarm"] = swarm
    with pytest.raises(EngineError, match=message) as raised:
        Manager()
    assert "docker swarm init" in raised.value.hint
