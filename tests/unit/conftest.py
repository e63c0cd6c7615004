"""Tests of one process share the folder for records, and must not see each other's jobs."""

import os
import shutil
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def own_records():
    folder = Path(os.environ["XDG_STATE_HOME"], "orchestrate")
    yield
    shutil.rmtree(folder, ignore_errors=True)
