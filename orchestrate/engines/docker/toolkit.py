"""How containers of a Docker Engine get GPUs: NVIDIA's runtime, or CDI devices, both of its container toolkit."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from docker.types import DeviceRequest

CDI = "nvidia.com/gpu"  # the kind of device that `nvidia-ctk cdi generate` describes; named by UUID, and `all`
REPORTS = (28, 2)  # the version of the engine from which on it reports CDI devices
CAPABILITIES = "compute,utility"  # the parts of the driver that CUDA and nvidia-smi need


def way(info: dict[str, Any]) -> str:
    """How the engine gives GPUs, by its own report: `runtime`, `cdi`, or an empty string.

    From 28.2 on, an engine reports the devices that it has found; an older one only the folders in which it looks.
    """
    if "nvidia" in info.get("Runtimes", {}):
        return "runtime"
    version = tuple(map(int, re.findall(r"\d+", str(info.get("ServerVersion", "")))[:2]))
    if version < REPORTS:
        return "cdi" if info.get("CDISpecDirs") else ""
    found = (str(one.get("ID", "")) for one in info.get("DiscoveredDevices") or ())
    return "cdi" if any(name.startswith(f"{CDI}=") for name in found) else ""


def host_config(way: str, gpus: Iterable[str]) -> dict[str, Any]:
    """The part of a container's host configuration that gives it GPUs, by UUID or `all`."""
    if way == "runtime":
        return {"runtime": "nvidia"}
    return {"device_requests": [DeviceRequest(driver="cdi", device_ids=[f"{CDI}={gpu}" for gpu in gpus])]}


def environment(way: str, gpus: Iterable[str]) -> dict[str, str]:
    """The environment that the runtime reads to give a container GPUs; CDI needs none."""
    if way != "runtime":
        return {}
    return {"NVIDIA_VISIBLE_DEVICES": ",".join(gpus), "NVIDIA_DRIVER_CAPABILITIES": CAPABILITIES}


def service(way: str, gpus: Iterable[str]) -> dict[str, Any]:
    """What a service of a Compose file needs for CDI devices; nothing for the runtime, which the file names."""
    names = [f"{CDI}={gpu}" for gpu in gpus]
    if way != "cdi" or not names:
        return {}
    return {
        "deploy": {
            "resources": {
                "reservations": {"devices": [{"driver": "cdi", "capabilities": ["gpu"], "device_ids": names}]}
            }
        }
    }
