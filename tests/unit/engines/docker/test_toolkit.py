"""How GPUs are requested from an engine."""

import pytest

from orchestrate.engines.docker import toolkit

DEVICE = {"Source": "cdi", "ID": "nvidia.com/gpu=all"}
OTHER = {"Source": "cdi", "ID": "amd.com/gpu=all"}


@pytest.mark.parametrize(
    ("info", "way"),
    [
        ({"Runtimes": {"nvidia": {}}, "CDISpecDirs": ["/etc/cdi"]}, "runtime"),
        ({"ServerVersion": "26.1.5+dfsg1", "CDISpecDirs": ["/etc/cdi"]}, "cdi"),
        ({"ServerVersion": "28.1.1", "CDISpecDirs": []}, ""),
        ({"ServerVersion": "28.2.0", "CDISpecDirs": ["/etc/cdi"], "DiscoveredDevices": [DEVICE]}, "cdi"),
        ({"ServerVersion": "29.0.0", "CDISpecDirs": ["/etc/cdi"], "DiscoveredDevices": [OTHER]}, ""),
        ({"ServerVersion": "29.0.0", "CDISpecDirs": ["/etc/cdi"]}, ""),  # the field is absent if there are none
        ({}, ""),
    ],
)
def test_gpus_must_be_requested_in_the_way_that_the_engine_reports(info, way):
    assert toolkit.gpu_mode(info) == way


def test_cdi_devices_must_be_requested_by_uuid_and_nothing_if_there_are_none():
    devices = {"driver": "cdi", "capabilities": ["gpu"], "device_ids": ["nvidia.com/gpu=GPU-1", "nvidia.com/gpu=GPU-2"]}
    wanted = {"deploy": {"resources": {"reservations": {"devices": [devices]}}}}
    assert toolkit.service("cdi", ["GPU-1", "GPU-2"]) == wanted
    assert toolkit.service("cdi", []) == toolkit.service("runtime", ["GPU-1"]) == {} and not toolkit.environment(
        "cdi", []
    )
    (request,) = toolkit.host_config("cdi", ["all"])["DeviceRequests"]
    assert (request["Driver"], request["DeviceIDs"]) == ("cdi", ["nvidia.com/gpu=all"])
