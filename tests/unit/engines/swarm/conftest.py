"""Sessions with fake nodes, and copies of their files."""

from typing import Any

import pytest
from support.swarm_nodes import three_nodes

from orchestrate.clock import SYSTEM, Clock
from orchestrate.engines.swarm import sync as sync_module
from orchestrate.engines.swarm.sync import FileSync


@pytest.fixture
def engine(stub, clock, tmp_path):
    """A session with three healthy nodes."""
    with three_nodes(clock, tmp_path) as session:
        yield session


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "folder").mkdir()
    return tmp_path / "folder"


@pytest.fixture
def synced(folder, monkeypatch):
    """Start to copy the files of nodes, which are given by name; return the running copy."""
    monkeypatch.setattr(sync_module, "SYNC_INTERVAL", 0.01)
    started: list[FileSync] = []

    def start(clock: Clock = SYSTEM, **nodes: Any) -> FileSync:
        ranks = {name: [rank] for rank, name in enumerate(nodes)}
        started.append(FileSync(folder, "job", ranks, lambda name: nodes[name], clock))
        return started[-1]

    yield start
    for sync in started:
        sync.close()
