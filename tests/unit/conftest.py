"""Unit tests must not see the records or claims of each other's jobs, nor remove those of nodes that tests share."""

import os
import shutil

import pytest

from orchestrate.host import claims


@pytest.fixture(scope="session")
def records_of_one_test(tmp_path_factory):
    return tmp_path_factory.mktemp("state")


@pytest.fixture(autouse=True)
def own_records(records_of_one_test):
    shared, os.environ["XDG_STATE_HOME"] = os.environ["XDG_STATE_HOME"], str(records_of_one_test)
    top, claims.TOP = claims.TOP, records_of_one_test
    yield
    os.environ["XDG_STATE_HOME"], claims.TOP = shared, top
    shutil.rmtree(records_of_one_test / "orchestrate", ignore_errors=True)
