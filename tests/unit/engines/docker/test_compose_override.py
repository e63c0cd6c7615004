"""A job's own settings in the form of a Compose file."""

import secrets
from pathlib import Path

import pytest
import yaml

from orchestrate.engines.docker.compose_override import document
from orchestrate.engines.docker.mounts import mask
from orchestrate.errors import UsageError
from orchestrate.node.trees import packed
from orchestrate.spec.spec import JobSpec


def test_settings_of_a_job_must_reach_all_its_nodes_as_written_and_its_ports_only_the_master():
    spec = JobSpec(labels={"team": "a$b"}, ports=["6006:80"], isolated=True)
    mount = {"type": "bind", "source": "/a$b", "target": "/c$d", "read_only": True}
    masks = [mask(Path("/a$b"), "f", "/c$d", folder=False), mask(Path("/a$b"), "runs", "/c$d", folder=True)]
    found = yaml.safe_load(document(spec, [mount, *masks], {"deploy": {"x": 1}}, "7:8"))
    assert found["networks"] == {"job": {"internal": True}}
    node = found["services"]["trainer"]
    assert node == {
        "volumes": [
            {**mount, "source": "/a$$b", "target": "/c$$d"},  # Compose would expand variables
            {**masks[0], "target": "/c$$d/f"},
            {**masks[1], "target": "/c$$d/runs"},
        ],
        "tmpfs": ["/run/secrets:size=1m,mode=0700,uid=7,gid=8,nosuid,nodev,noexec"],
        "labels": {"team": "a$$b"},
        "deploy": {"x": 1},
        "environment": {"NODE_MASKS": packed(["/c$d/f", "/c$d/runs"])},
    }
    assert found["services"]["master"] == {**node, "ports": ["127.0.0.1:6006:80"]}
    plain = yaml.safe_load(document(JobSpec(), [], {}, "7:8"))
    assert plain.keys() == {"services"} and plain["services"]["master"] == plain["services"]["trainer"]


def test_masks_that_fit_into_no_variable_must_be_refused():
    masks = [mask(Path("/a"), secrets.token_hex(100), "/c", folder=False) for _ in range(1000)]
    with pytest.raises(UsageError, match="nodes cannot be told all 1000 sockets"):
        document(JobSpec(), masks, {}, "7:8")
