"""How a Swarm's GPUs are shared out, and how long a lost node's workers are waited for."""

import time

import pytest

from orchestrate.engines.links import Linked
from orchestrate.engines.manager import shared_out
from orchestrate.engines.swarm import SwarmEngine
from orchestrate.node.lease import LEASE


@pytest.mark.parametrize(
    ("offered", "nodes", "spares", "used"),
    [
        ([4, 4], 2, 0, 8),
        ([4, 4], 2, 2, 4),  # two each, so that the spare nodes find as many
        ([4, 4], 3, 0, 6),
        ([4, 4], 3, 1, 6),
        ([2, 2, 2], 3, 3, 3),
        ([8, 1], 2, 0, 8),
        ([1, 1], 3, 0, 2),  # too few, which the plan refuses
        ([0, 0], 2, 0, 0),
        ([], 2, 0, 0),
    ],
)
def test_nodes_must_have_as_many_gpus_each_as_leave_some_for_the_spare_ones(offered, nodes, spares, used):
    assert shared_out(offered, nodes, spares) == used


def test_the_workers_of_a_node_that_is_silent_must_be_waited_for_until_its_lease_is_over():
    engine = SwarmEngine.__new__(SwarmEngine)  # without a Swarm
    Linked.__init__(engine)
    engine.nodes, engine.lost, engine.unsure = {"trainer-1": {"ID": "task"}}, {}, {}
    heard = time.monotonic() - 3
    engine.said, engine.running = {"trainer-1": heard}, {1: "trainer-1"}
    engine._end([1])
    assert engine.unsure["task"] > heard + LEASE
