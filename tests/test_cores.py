"""Cores must stand in an order in which neighbours share caches and memory, and be dealt out in equal shares."""

import os

import pytest

from orchestrate.cores import cores, shares


@pytest.fixture
def system(tmp_path, monkeypatch):
    """A machine of two sockets, each a NUMA node of two physical cores with two threads, numbered as Linux does."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    for core in range(8):
        folder = tmp_path / "cpu" / f"cpu{core}"
        (folder / "topology").mkdir(parents=True)
        (folder / f"node{core % 2}").mkdir()
        (folder / "topology" / "physical_package_id").write_text(f"{core % 2}\n")
        (folder / "topology" / "core_id").write_text(f"{core % 4 // 2}\n")
    return tmp_path


def test_the_threads_of_a_core_and_the_cores_of_a_numa_node_must_be_neighbours(system):
    assert cores(system) == (0, 4, 2, 6, 1, 5, 3, 7)


def test_only_cores_that_may_be_used_must_be_dealt_out(system, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 2, 4, 5})
    assert cores(system) == (4, 2, 1, 5)


def test_a_system_that_says_nothing_must_give_the_order_of_the_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 0, 1}, raising=False)
    assert cores(tmp_path) == (0, 1, 3)


def test_shares_must_be_equal_and_disjoint():
    assert shares((0, 4, 2, 6, 1, 5, 3, 7), 3) == [(0, 4), (2, 6), (1, 5)]
    assert shares((0, 4), 2) == [(0,), (4,)]
