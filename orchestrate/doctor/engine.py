"""Checks of a Docker Engine beyond its connection: versions, settings, networks, disk, clock."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from datetime import datetime
from ipaddress import ip_network
from pathlib import Path
from typing import Any

from orchestrate.doctor import machine
from orchestrate.doctor.findings import GOOD, WARNING, Finding
from orchestrate.engines.docker.client import Daemon
from orchestrate.errors import EngineError

POOLS = [("172.17.0.0/12", 16, 15), ("192.168.0.0/16", 20, 16)]  # default: base, size, networks in it
FEW_NETWORKS = 3
MAX_SKEW = 3.0  # seconds between the clocks of the engine, which answered a moment ago, and of this machine
REMOTE = ("tcp://", "ssh://", "http://", "https://")


def settings(daemon: Daemon) -> Iterator[Finding]:
    """Report the settings of an engine; each warning says how to change one."""
    info = daemon.info
    yield Finding(GOOD, f"Docker Engine {info['ServerVersion']} at {daemon.host}, Compose {_compose(daemon)}")
    for text in info.get("Warnings") or []:
        text = text.removeprefix("WARNING: ")
        yield Finding(WARNING, f"the engine reports: {text}", "docker info shows it, too")
    alive = info.get("LiveRestoreEnabled")
    what = "jobs continue" if alive else "all jobs start again from their checkpoints"
    hint = "" if alive else 'to avoid that, "live-restore": true in its daemon.json'
    version = info.get("CgroupVersion") or "unknown"
    yield Finding(GOOD, f"cgroup version {version}; when the engine restarts, {what}", hint)
    yield from _networks(daemon)
    yield from _clock(info)
    if not daemon.host.startswith(REMOTE):
        yield from machine.disk(Path(info.get("DockerRootDir") or "/"), "the engine")
    yield from _mtu(daemon)


def _compose(daemon: Daemon) -> str:
    try:
        return daemon.compose("version", "--short", capture=True).strip().removeprefix("v")
    except EngineError:
        return "of unknown version"


def _networks(daemon: Daemon) -> Iterator[Finding]:
    """Report how many more networks the address pools allow, since each job has one."""
    pools = [
        (pool["Base"], pool["Size"], 1 << max(0, pool["Size"] - ip_network(pool["Base"], strict=False).prefixlen))
        for pool in daemon.info.get("DefaultAddressPools") or []
        if ip_network(pool["Base"], strict=False).version == 4
    ] or POOLS
    with daemon.translating_errors("could not list its networks"):
        found = [network.attrs for network in daemon.client.networks.list()]
    used = sum(
        any(ip_network(config["Subnet"], strict=False).overlaps(ip_network(base, strict=False)) for base, _, _ in pools)
        for network in found
        for config in (network["IPAM"]["Config"] or [])[:1]
        if network["Driver"] == "bridge" and ":" not in config.get("Subnet", ":")
    )
    left = max(0, sum(count for _, _, count in pools) - used)
    few = left < FEW_NETWORKS
    hint = "docker network prune, or default-address-pools in its daemon.json" if few else ""
    yield Finding(WARNING if few else GOOD, f"address pools for {left} more networks: one for each job", hint)


def _clock(info: dict[str, Any]) -> Iterator[Finding]:
    """Report an engine whose clock differs, as in a virtual machine that was suspended."""
    text = re.sub(r"\.\d+", "", info.get("SystemTime", "")).replace("Z", "+00:00")
    try:
        skew = datetime.fromisoformat(text).timestamp() - time.time()
    except ValueError:
        return
    if abs(skew) > MAX_SKEW:
        yield Finding(WARNING, f"the engine's clock differs by {skew:+.0f} s", "restart Docker, or set up NTP")


def _mtu(daemon: Daemon) -> Iterator[Finding]:
    """Report a network whose packets are larger than this machine's link to the internet can carry."""
    link = machine.link_mtu()
    with daemon.translating_errors("could not inspect its network"):
        bridge = daemon.client.networks.list(names=["bridge"])
    option = (bridge[0].attrs.get("Options") or {}).get("com.docker.network.driver.mtu", "") if bridge else ""
    own = int(option) if str(option).isdecimal() else machine.ETHERNET
    if link is not None and link < own:
        what = f"packets of containers have up to {own} bytes, and this machine's link carries {link}"
        hint = f'"default-network-opts": {{"bridge": {{"com.docker.network.driver.mtu": "{link}"}}}} in its daemon.json'
        yield Finding(WARNING, what, hint)
