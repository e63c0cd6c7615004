"""A cluster of Slurm for all tests."""

import itertools

import pytest
from support.slurm_cluster import Cluster

_numbers = itertools.count()


@pytest.fixture(scope="session")
def machines(docker_engine, tmp_path_factory):
    """A cluster of three machines."""
    cluster = Cluster(tmp_path_factory.mktemp("slurm"))
    yield cluster
    cluster.down()


@pytest.fixture
def folder(machines):
    """A folder that all machines share."""
    folder = machines.folder / f"test-{next(_numbers)}"
    folder.mkdir()
    return folder
