"""A job on a scripted engine."""

import pytest
from support.scripted import Job


@pytest.fixture
def job(tmp_path):
    return Job(tmp_path)
