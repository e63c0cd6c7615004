"""Keys for what surrounds nodes: what is refused."""

import pytest

from orchestrate.errors import UsageError
from orchestrate.job.layers import resolve


@pytest.mark.parametrize(
    "layer",
    [
        {"isolated": True, "network": "host"},
        {"isolated": True, "ports": [80]},
        {"isolated": True, "host_access": True},
        {"ports": ["80:1", "80:2"]},
        {"network": "host", "ports": [80]},
        {"network": "host", "services": "compose.yaml"},
        {"ports": [70000]},
        {"ports": ["a:b"]},
        {"labels": {"orchestrate.job": "x"}},
        {"labels": {"com.docker.compose.project": "x"}},
        {"labels": {"": "x"}},
        {"labels": {"a": "x\n"}},
    ],
)
def test_contradictions_and_reserved_labels_must_be_refused(layer):
    with pytest.raises(UsageError):
        resolve(layer)
