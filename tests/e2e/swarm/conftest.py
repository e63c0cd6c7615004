"""Three hosts, each with its own engine; they are network namespaces of this machine."""

import os
import shutil

import pytest
from support.hosts import Swarm
from support.leftovers import DOCKER_REQUIRED
from support.waiting import eventually


@pytest.fixture(scope="session")
def hosts(docker_engine):
    """Three hosts; the fixture `swarm` checks that they are healthy and that a test leaves nothing on them."""
    if os.getuid() or not all(map(shutil.which, ("ip", "iptables", "nsenter", "unshare", "dockerd"))):
        reason = "needs root, iproute2, iptables and dockerd: each host is a network namespace with its own dockerd"
        pytest.fail(reason) if DOCKER_REQUIRED else pytest.skip(reason)
    swarm = Swarm()
    yield swarm
    swarm.remove()


@pytest.fixture
def swarm(hosts, cli):
    hosts.well()
    eventually(lambda: not hosts.left())
    cli.env["DOCKER_HOST"] = hosts.hosts[0].socket
    yield hosts
    for host in hosts.hosts:
        host.restore()
    hosts.well()
    try:
        eventually(lambda: not hosts.left())
    except AssertionError:
        cli.clean()
        eventually(hosts.clear)  # for the tests that follow
        raise
