"""The plug-in: `@pytest.mark.nodes(N)` runs a test on every rank of a job.

It is loaded with every pytest of an environment, so it imports what it needs when a test has that marker.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

MARKER = "nodes(count, nproc_per_node=1, timeout=300, **settings): run a test on every rank of a job with these nodes"
RANK = "orchestrate-rank"  # the plug-in of a rank, which runs the test itself
WORLDS = pytest.StashKey[Any]()  # of `session.Worlds`


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the plug-in."""
    group = parser.getgroup("nodes", "tests on every rank of a job")
    engines = ["process", "docker"]
    group.addoption("--nodes-engine", default="process", choices=engines, help="engine of the jobs (default: process)")
    group.addoption(
        "--nodes-runs", metavar="FOLDER", help="folder for their run directories (default: a temporary one)"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line("markers", MARKER)


@pytest.fixture(scope="session")
def rank() -> int:
    """Rank of this process, in tests with the marker `nodes`."""
    pytest.fail("the fixture rank is for tests with @pytest.mark.nodes(N)", pytrace=False)


@pytest.fixture(scope="session")
def world_size() -> int:
    """Number of ranks, in tests with the marker `nodes`."""
    pytest.fail("the fixture world_size is for tests with @pytest.mark.nodes(N)", pytrace=False)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Run a test with the marker on all ranks."""
    if not item.get_closest_marker("nodes") or item.config.pluginmanager.hasplugin(RANK):
        return None
    from orchestrate.testing.session import Worlds  # only for tests with the marker

    worlds = item.config.stash.setdefault(WORLDS, Worlds(item.session))
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in worlds.run(item, nextitem):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


@pytest.hookimpl(wrapper=True, trylast=True)  # before pytest-cov combines what ranks have measured
def pytest_runtestloop(session: pytest.Session) -> Generator[None, object, object]:
    """End the jobs after the last test, and remove their nodes."""
    ranks = session.config.pluginmanager.hasplugin(RANK)
    if not ranks and any(item.get_closest_marker("nodes") for item in session.items):
        import orchestrate.testing.session  # here: the limit of pytest-timeout includes what a test imports  # noqa: F401
    try:
        return (yield)
    finally:
        if worlds := session.config.stash.get(WORLDS, None):
            worlds.close()
