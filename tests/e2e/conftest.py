"""Fixtures for jobs on real engines, and on which engines a test runs."""

import pytest
from support.leftovers import DOCKER_REQUIRED, docker_answers
from support.warm_cluster import Ready, of_each_engine

ENGINES = {"process": "process", "docker": pytest.param("docker", marks=pytest.mark.docker)}


def pytest_generate_tests(metafunc):
    """Run a test on both engines if they differ in what it tests, otherwise on one: Docker, if it runs and matters."""
    if "engine" not in metafunc.fixturenames:
        return
    marked = metafunc.definition.get_closest_marker
    docker = not marked("any_engine") and (DOCKER_REQUIRED or docker_answers())
    one = "docker" if docker else "process"
    each = metafunc.config.option.all or marked("each_engine")
    metafunc.parametrize("engine", ENGINES.values() if each else [ENGINES[one]], indirect=True)


@pytest.fixture
def engine(request, nothing_left):
    """An engine; the test must leave nothing behind."""
    if request.param == "docker":
        request.getfixturevalue("docker_engine")
    return request.param


@pytest.fixture(scope="session")
def ready_nodes(tmp_path_factory):
    """Nodes of each engine that stay up, created on first use."""
    yield from of_each_engine(lambda engine: Ready(tmp_path_factory.mktemp(f"ready-{engine}"), engine))


@pytest.fixture
def ready(engine, ready_nodes):
    """The command line in a folder whose nodes are already up, for tests of what workers do."""
    nodes = ready_nodes(engine)
    nodes.up()
    yield nodes
    nodes.settle()
