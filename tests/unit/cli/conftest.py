"""The scripted engine of commands in this process."""

import pytest
from support.commanded import Commands, Whole


@pytest.fixture
def engine(do: Commands) -> Whole:
    return do.engine


@pytest.fixture(autouse=True)
def own_records(tmp_path_factory, monkeypatch):
    """Records of this test only: a job is found by its name in any folder, and other tests use the same names."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
