"""GPUs in containers, by NVIDIA's container toolkit: its runtime, or CDI devices."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

CDI = "nvidia.com/gpu"  # device kind of `nvidia-ctk cdi generate`; devices are named by UUID, or `all`
REPORTS = (28, 2)  # first version of the engine that reports CDI devices
CAPABILITIES = "compute,utility"  # parts of the driver that CUDA and nvidia-smi need


def gpu_mode(info: dict[str, Any]) -> str:
    """Return how the engine provides GPUs: `runtime`, `cdi`, or an empty string.

    Since 28.2 engines report the devices that they have found; older ones only report the folders that they search.
    """
    if "nvidia" in info.get("Runtimes", {}):
        return "runtime"
    version = tuple(map(int, re.findall(r"\d+", str(info.get("ServerVersion", "")))[:2]))
    if version < REPORTS:
        return "cdi" if info.get("CDISpecDirs") else ""
    found = (str(device.get("ID", "")) for device in info.get("DiscoveredDevices") or ())
    return "cdi" if any(name.startswith(f"{CDI}=") for name in found) else ""


def host_config(gpu_mode: str, gpus: Iterable[str]) -> dict[str, Any]:
    """Return the part of a container's host configuration, in the API's words, that provides GPUs: UUIDs or `all`."""
    if gpu_mode == "runtime":
        return {"Runtime": "nvidia"}
    return {"DeviceRequests": [{"Driver": "cdi", "DeviceIDs": [f"{CDI}={gpu}" for gpu in gpus]}]}


def environment(gpu_mode: str, gpus: Iterable[str]) -> list[str]:
    """Return the environment variables, as `NAME=VALUE`, that select GPUs for the runtime; CDI needs none."""
    if gpu_mode != "runtime":
        return []
    return [f"NVIDIA_VISIBLE_DEVICES={','.join(gpus)}", f"NVIDIA_DRIVER_CAPABILITIES={CAPABILITIES}"]


def service(gpu_mode: str, gpus: Iterable[str]) -> dict[str, Any]:
    """Return the part of a Compose service that adds CDI devices; empty for the runtime, which the file names."""
    names = [f"{CDI}={gpu}" for gpu in gpus]
    if gpu_mode != "cdi" or not names:
        return {}
    return {
        "deploy": {
            "resources": {
                "reservations": {"devices": [{"driver": "cdi", "capabilities": ["gpu"], "device_ids": names}]}
            }
        }
    }
