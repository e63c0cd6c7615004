"""Variables of frameworks."""

import re

import pytest
from support.repo import ROOT

from orchestrate.node import frameworks


def test_the_documented_variables_must_be_those_that_are_set():
    text = (ROOT / "docs" / "frameworks.md").read_text()
    table = text[text.index("| variable |") : text.index("\n\n", text.index("| variable |"))]
    assert {*re.findall(r"`([A-Z][A-Z_]+)`", table)} >= frameworks.NAMES


def test_variables_for_the_cpu_must_be_set_only_without_gpus():
    cpu, gpu = (frameworks.variables(4, 2, on_gpus=on_gpus) for on_gpus in (False, True))
    assert cpu == gpu | {"ACCELERATE_USE_CPU": "true", "DS_ACCELERATOR": "cpu"}


def test_a_single_worker_must_be_left_to_its_framework():
    """It may use an accelerator of another kind."""
    assert frameworks.variables(1, 1, on_gpus=False) == {}


@pytest.mark.parametrize("nodes", [1, 2])
def test_workers_must_be_counted_by_node_and_nodes_by_job(nodes):
    found = frameworks.variables(nodes, 3, on_gpus=True)
    assert {name for name, value in found.items() if value == "3"} == {"PL_TRAINER_DEVICES", "LT_DEVICES", "LOCAL_SIZE"}
    assert [found[name] for name in ("PL_TRAINER_NUM_NODES", "LT_NUM_NODES")] == [str(nodes)] * 2
