"""Variables that depend on a worker's machine: the network interface to the master, and the GPUs of the node."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct

from orchestrate.node.ranks import Env

SIOCGIFADDR = 0x8915  # of Linux' netdevice(7)


def local_env(env: Env) -> Env:
    """The complete environment of a worker; its GPUs are those that Swarm or Slurm has reserved for this node."""
    found = dict(env)
    if not env.get("GLOO_SOCKET_IFNAME"):
        found["GLOO_SOCKET_IFNAME"] = found["NCCL_SOCKET_IFNAME"] = interface_to(env.get("MASTER_ADDR", ""))
    if env.get("CUDA_VISIBLE_DEVICES"):
        reserved = [value for name, value in sorted(os.environ.items()) if name.startswith("DOCKER_RESOURCE_")]
        own = ",".join(reserved) or os.environ.get("CUDA_VISIBLE_DEVICES")
        found["CUDA_VISIBLE_DEVICES"] = own or env["CUDA_VISIBLE_DEVICES"]
    return found


def interface_to(host: str) -> str:
    """The network interface of the route to a host; empty if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # sends nothing
            own = socket.inet_aton(probe.getsockname()[0])
        except (OSError, UnicodeError):  # no such host, or not a valid host name
            return ""
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                reply = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if reply[20:24] == own:
                    return name
    return ""
