"""A job's own settings in the form of a Compose file."""

import yaml

from orchestrate.engines.docker.compose_override import document
from orchestrate.spec.spec import JobSpec


def test_settings_of_a_job_must_reach_all_its_nodes_as_written_and_its_ports_only_the_master():
    spec = JobSpec(labels={"team": "a$b"}, ports=["6006:80"], isolated=True)
    mount = {"type": "bind", "source": "/a$b", "target": "/c$d", "read_only": True}
    found = yaml.safe_load(document(spec, [mount], {"deploy": {"x": 1}}, "7:8"))
    assert found["networks"] == {"job": {"internal": True}}
    node = found["services"]["trainer"]
    assert node == {
        "volumes": [{**mount, "source": "/a$$b", "target": "/c$$d"}],  # Compose would expand variables
        "tmpfs": ["/run/secrets:size=1m,mode=0700,uid=7,gid=8,nosuid,nodev,noexec"],
        "labels": {"team": "a$$b"},
        "deploy": {"x": 1},
    }
    assert found["services"]["master"] == {**node, "ports": ["127.0.0.1:6006:80"]}
    plain = yaml.safe_load(document(JobSpec(), [], {}, "7:8"))
    assert plain.keys() == {"services"} and plain["services"]["master"] == plain["services"]["trainer"]
