"""The scripted engine of commands in this process."""

import pytest
from support.commanded import Commands, Whole


@pytest.fixture
def engine(do: Commands) -> Whole:
    return do.engine
