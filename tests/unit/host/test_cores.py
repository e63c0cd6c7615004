"""Cores must be ordered so that neighbors share caches and memory, and be assigned in equal shares."""

import os

import pytest

from orchestrate.host.cores import cores, shares


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


def test_threads_of_a_core_and_cores_of_a_numa_node_must_be_adjacent(system):
    assert cores(system) == (0, 4, 2, 6, 1, 5, 3, 7)


def described(tmp_path, core: int, **facts: object) -> None:
    """Create the system's topology files for a core: its NUMA node, package and physical core, or fewer of them."""
    folder = tmp_path / "cpu" / f"cpu{core}"
    (folder / "topology").mkdir(parents=True)
    for name, number in facts.items():
        if name == "node":
            (folder / f"node{number}").mkdir()
        else:
            (folder / "topology" / name).write_text(f"{number}\n")


def test_numa_nodes_of_one_package_must_be_kept_apart(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)), raising=False)
    for core in range(6):
        described(tmp_path, core, node=(2, 10)[core % 2], physical_package_id=0, core_id=core)
    assert cores(tmp_path) == (0, 2, 4, 1, 3, 5)


def test_packages_must_be_kept_apart_on_a_system_without_numa_nodes(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)), raising=False)
    for core in range(4):
        described(tmp_path, core, physical_package_id=core % 2, core_id=core // 2)
    assert cores(tmp_path) == (0, 2, 1, 3)


def test_missing_topology_facts_must_not_hide_the_rest(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)), raising=False)
    for core in range(4):
        described(tmp_path, core, core_id=core % 2)  # and no package
        described(tmp_path / "empty", core, physical_package_id="", core_id=core % 2)
    assert cores(tmp_path) == cores(tmp_path / "empty") == (0, 2, 1, 3)


def test_a_system_without_cpu_affinity_must_offer_all_cores(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    for count, found in ((3, (0, 1, 2)), (None, (0,))):
        monkeypatch.setattr(os, "cpu_count", lambda count=count: count)
        assert cores(tmp_path) == found


def test_only_allowed_cores_must_be_listed(system, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 2, 4, 5})
    assert cores(system) == (4, 2, 1, 5)


def test_a_system_without_topology_must_give_numeric_order(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 0, 1}, raising=False)
    assert cores(tmp_path) == (0, 1, 3)


def test_shares_must_be_equal_and_disjoint():
    assert shares((0, 4, 2, 6, 1, 5, 3, 7), 3) == [(0, 4), (2, 6), (1, 5)]
    assert shares((0, 4), 2) == [(0,), (4,)]
