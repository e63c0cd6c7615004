"""Keys for what surrounds nodes: what is refused."""

import pytest

from orchestrate.errors import UsageError
from orchestrate.spec.layers import resolve


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        ({"isolated": True, "network": "host"}, "isolated: true contradicts network: host"),
        ({"isolated": True, "ports": [80]}, "isolated: true contradicts ports"),
        ({"isolated": True, "host_access": True}, "isolated: true contradicts host_access: true"),
        ({"ports": ["80:1", "80:2"]}, "each port of this machine only once"),
        ({"network": "host", "ports": [80]}, "ports contradicts network: host, where all ports are open"),
        ({"network": "host", "services": "compose.yaml"}, "services contradicts network: host"),
        ({"ports": [70000]}, "a list of ports from 1 to 65535"),
        ({"ports": ["65536:80"]}, "a list of ports from 1 to 65535"),
        ({"ports": ["a:b"]}, "a list of ports from 1 to 65535"),
        ({"labels": {"orchestrate.job": "x"}}, "labels that start with .* are reserved"),
        ({"labels": {"com.docker.compose.project": "x"}}, "labels that start with .* are reserved"),
        ({"labels": {"io.docker.a": "x"}}, "labels that start with .* are reserved"),
        ({"labels": {"org.dockerproject.a": "x"}}, "labels that start with .* are reserved"),
        ({"labels": {"": "x"}}, "a mapping of labels to text"),
        ({"labels": {"a": "x\n"}}, "the value of a is not text on one line"),
        ({"labels": {"a": "x" * 4097}}, "the value of a is not text on one line"),
    ],
)
def test_contradictions_and_reserved_labels_must_be_refused(layer, why):
    with pytest.raises(UsageError, match=why):
        resolve(layer)
