"""Checks of a Docker Engine beyond its connection: versions, settings, networks, disk, clock."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterator
from datetime import datetime
from ipaddress import IPv4Network, ip_network
from pathlib import Path
from typing import Any

from orchestrate.doctor import machine
from orchestrate.doctor.findings import GOOD, WARNING, Finding
from orchestrate.engines.docker.client import Daemon
from orchestrate.errors import EngineError

POOLS: list[dict[str, Any]] = [  # an engine's default
    {"Base": "172.16.0.0/12", "Size": 16},
    {"Base": "192.168.0.0/16", "Size": 20},
]
RESERVED = 1  # 172.16.0.0/16, which is not among them
FEW_NETWORKS = 3
MAX_SKEW = 3.0  # seconds between the clocks of the engine and of this machine
MTU = "com.docker.network.driver.mtu"


def settings(daemon: Daemon) -> Iterator[Finding]:
    """Report the settings of an engine; each warning says how to change one."""
    info, local = daemon.info, daemon.host.startswith("unix://")
    version = info.get("ServerVersion") or "of unknown version"
    yield Finding(GOOD, f"Docker Engine {version} at {daemon.host}, Compose {_compose(daemon)}")
    for text in info.get("Warnings") or []:
        yield Finding(WARNING, f"the engine reports: {str(text).removeprefix('WARNING: ')}", "see docker info")
    yield Finding(GOOD, f"cgroup version {info.get('CgroupVersion') or 'unknown'}")
    alive = info.get("LiveRestoreEnabled")
    what = "jobs continue" if alive else "jobs start again from their checkpoints"
    hint = "" if alive else 'to avoid that: "live-restore": true in /etc/docker/daemon.json'
    yield Finding(GOOD, f"when the engine restarts, {what}", hint)
    yield from _networks(daemon)
    yield from _clock(daemon)
    if local:
        yield from machine.disk(Path(info.get("DockerRootDir") or "/"), "the engine")
        yield from _mtu(daemon)


def _compose(daemon: Daemon) -> str:
    try:
        return daemon.compose("version", "--short", capture=True).strip().removeprefix("v")
    except EngineError:
        return "of unknown version"


def subnet(text: Any) -> IPv4Network | None:
    """Parse a subnet; None for one of IPv6, and for what is none."""
    try:
        found = ip_network(text, strict=False)
    except ValueError:
        return None
    return found if isinstance(found, IPv4Network) else None


def _networks(daemon: Daemon) -> Iterator[Finding]:
    """Report how many more networks the address pools allow, since each job has one."""
    own: list[dict[str, Any]] = daemon.info.get("DefaultAddressPools") or []
    pools = [(base, pool["Size"]) for pool in own or POOLS if (base := subnet(pool.get("Base"))) and pool.get("Size")]
    with daemon.translating_errors("could not list its networks"):
        found = daemon.networks()
    configs = [one for attrs in found for one in (attrs.get("IPAM") or {}).get("Config") or [] if one]
    taken = [net for one in configs if (net := subnet(one.get("Subnet")))]
    used = sum(any(net.overlaps(base) for base, _ in pools) for net in taken)
    left = max(0, sum(1 << max(0, size - base.prefixlen) for base, size in pools) - used - (not own) * RESERVED)
    few = left < FEW_NETWORKS
    hint = "docker network prune, or default-address-pools in /etc/docker/daemon.json" if few else ""
    yield Finding(WARNING if few else GOOD, f"address pools for {left} more networks: one for each job", hint)


def _clock(daemon: Daemon) -> Iterator[Finding]:
    """Report an engine whose clock differs, as in a virtual machine that was suspended."""
    before = time.time()
    with daemon.translating_errors("could not tell its time"):
        text = re.sub(r"\.\d+", "", daemon.api.get("/info").get("SystemTime") or "").replace("Z", "+00:00")
    try:
        skew = datetime.fromisoformat(text).timestamp() - (before + time.time()) / 2
    except (ValueError, OverflowError):
        return
    if MAX_SKEW < abs(skew) < before:  # an engine without a clock reports the year 1
        yield Finding(WARNING, f"the engine's clock differs by {skew:+.0f} s", "restart Docker, or set up NTP")


def _mtu(daemon: Daemon) -> Iterator[Finding]:
    """Report networks whose packets are larger than this machine's link to the internet can carry."""
    with daemon.translating_errors("could not create a network"):
        given = {"Name": f"doctor-{secrets.token_hex(6)}", "Driver": "bridge"}
        path = f"/networks/{daemon.api.post('/networks/create', given)['Id']}"
        try:
            option = str((daemon.api.get(path).get("Options") or {}).get(MTU, ""))
        finally:
            daemon.api.delete(path)
    link, own = machine.link_mtu(), int(option) if option.isdecimal() else machine.ETHERNET
    if link is not None and link < own:
        what = f"packets of containers have up to {own} bytes, and this machine's link carries {link}"
        hint = f'"default-network-opts": {{"bridge": {{"{MTU}": "{link}"}}}} in /etc/docker/daemon.json'
        yield Finding(WARNING, what, hint)
