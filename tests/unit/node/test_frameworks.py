"""Variables of frameworks."""

import re

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


def test_several_workers_on_one_node_must_find_each_other():
    assert frameworks.variables(1, 2, on_gpus=True).items() >= {"PL_TRAINER_NUM_NODES": "1", "LT_DEVICES": "2"}.items()
