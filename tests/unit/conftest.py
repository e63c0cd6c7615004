"""Unit tests must not see the records of each other's jobs, nor remove those of nodes that other tests share."""

import os
import shutil

import pytest


@pytest.fixture(scope="session")
def records_of_one_test(tmp_path_factory):
    return tmp_path_factory.mktemp("state")


@pytest.fixture(autouse=True)
def own_records(records_of_one_test):
    shared, os.environ["XDG_STATE_HOME"] = os.environ["XDG_STATE_HOME"], str(records_of_one_test)
    yield
    os.environ["XDG_STATE_HOME"] = shared
    shutil.rmtree(records_of_one_test / "orchestrate", ignore_errors=True)
