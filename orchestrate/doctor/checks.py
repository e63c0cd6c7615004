"""doctor(): check for problems that keep jobs from running on the local engine and on the hosts of its Swarm."""

from __future__ import annotations

import io
import os
import re
import socket
import tarfile
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from orchestrate.console import print_message
from orchestrate.doctor import engine
from orchestrate.doctor.findings import BAD, GOOD, WARNING, Finding
from orchestrate.doctor.machine import gpus, local, torch_version
from orchestrate.doctor.trial import trial
from orchestrate.engines.docker import toolkit
from orchestrate.engines.docker.client import Daemon
from orchestrate.engines.docker.guard import wanted
from orchestrate.engines.docker.image import has_image
from orchestrate.engines.swarm.engine import SwarmEngine
from orchestrate.engines.swarm.manager import ApiObject, ready
from orchestrate.engines.swarm.manager import gpus as offered
from orchestrate.engines.swarm.session import SwarmSession
from orchestrate.engines.swarm.upload import send_archive
from orchestrate.errors import EngineError, OrchestrateError
from orchestrate.host import records, users
from orchestrate.host.gpus import look
from orchestrate.node.files import PIECE, digest
from orchestrate.node.messages import protocol
from orchestrate.node.ranks import MASTER_PORT
from orchestrate.plan.plan import plan, pluralize
from orchestrate.record.run_dir import new_paths
from orchestrate.spec.spec import IMAGE, JobSpec

MIN_ENGINE_VERSION = (20, 10)  # the first with capabilities of services
MAX_CLOCK_SKEW = 1.0  # seconds between hosts, so that their logs can be compared
CONNECT_TIMEOUT = 2.0  # seconds
SWARM_PORTS = (2377, 7946)  # TCP: managers only, all hosts


def doctor(spec: JobSpec, job: bool = False) -> Iterator[Finding]:
    """Check the Docker Engine, with `job` also by a job if it has the image, and its Swarm if it manages one."""
    try:
        daemon = Daemon()
    except OrchestrateError as error:
        usable = spec.engine == "auto" and bool(torch_version())  # local processes are the fallback
        yield Finding(WARNING if usable else BAD, str(error), error.hint, error.exit_code)
        yield from local()
        if job and usable:
            yield from trial(spec)
        return
    info = daemon.info
    yield from engine.settings(daemon)
    yield from _gpus(info)
    yield (
        Finding(GOOD, f"image {spec.image} exists")
        if has_image(daemon, spec.image)
        else Finding(WARNING, f"image {spec.image} is missing", "the first run builds or pulls it")
    )
    if spec.image != IMAGE and wanted(spec) and not has_image(daemon, IMAGE):
        what = f"image {IMAGE} is missing: without it, nodes can reach this machine's ports"
        yield Finding(WARNING, what, "docker compose build")
    if job and spec.engine != "swarm" and has_image(daemon, spec.image):
        yield from trial(spec)
    if info.get("Swarm", {}).get("LocalNodeState") != "active":
        yield Finding(GOOD, "not part of a Swarm")
        return
    try:
        swarm = SwarmEngine()
    except OrchestrateError as error:
        yield Finding(WARNING, str(error), error.hint)
        return
    yield from check_swarm(swarm, spec)


def _gpus(info: dict[str, Any]) -> Iterator[Finding]:
    """Report how containers get GPUs, and the GPUs of this machine."""
    found, way = look(), toolkit.gpu_mode(info)
    hint = "install NVIDIA's container toolkit, then nvidia-ctk runtime configure --runtime=docker" if found else ""
    yield {
        "runtime": Finding(GOOD, "NVIDIA runtime is installed"),
        "cdi": Finding(GOOD, f"GPUs are available to containers as CDI devices ({toolkit.CDI})"),
        "": Finding(WARNING if found else GOOD, "no NVIDIA runtime: jobs train on the CPU", hint),
    }[way]
    yield from gpus(found)


def check_swarm(swarm: SwarmEngine, spec: JobSpec) -> Iterator[Finding]:
    """Report the hosts of a Swarm."""
    hosts = sorted(swarm.manager.hosts().values(), key=lambda host: str(host["Description"]["Hostname"]))
    versions = {str(host["Description"]["Engine"]["EngineVersion"]) for host in hosts}
    if len(versions) > 1:
        yield Finding(
            WARNING, f"engine versions differ between hosts: {', '.join(sorted(versions))}", "update the older ones"
        )
    for host in hosts:
        yield from check_host(host)
    try:
        yield from check_overlay(swarm, spec, {str(host["Description"]["Hostname"]) for host in hosts if ready(host)})
    except OrchestrateError as error:
        yield Finding(BAD, str(error), error.hint)


def check_host(host: ApiObject) -> Iterator[Finding]:
    """Report a host's state according to the manager, and check its ports."""
    name, address = host["Description"]["Hostname"], host["Status"]["Addr"]
    version = host["Description"]["Engine"]["EngineVersion"]
    if not ready(host):
        state = f"{host['Status']['State']}, {host['Spec']['Availability']}"
        yield Finding(WARNING, f"{name} ({address}) accepts no nodes: {state}", f"docker node inspect {name}")
        return
    yield Finding(GOOD, f"{name} ({address}): engine {version}, {pluralize(offered(host), 'GPU')} offered")
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < MIN_ENGINE_VERSION:
        yield Finding(
            BAD,
            f"{name}: engine {version} is older than {'.'.join(map(str, MIN_ENGINE_VERSION))}",
            "update Docker on it",
        )
    for port in SWARM_PORTS if host.get("ManagerStatus") else SWARM_PORTS[1:]:
        try:
            socket.create_connection((address, port), CONNECT_TIMEOUT).close()
        except OSError:
            yield Finding(BAD, f"{name}: {address} does not respond on {port}/tcp", "open the port between the hosts")


def check_overlay(swarm: SwarmEngine, spec: JobSpec, hosts: set[str]) -> Iterator[Finding]:
    """Start a node on each host and connect to it; raises EngineError if that fails, such as without an overlay."""
    probe = JobSpec(name="doctor", trainers=len(hosts) - 1, gpus="none", image=spec.image, warm=False, grace=1.0)
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "data").open("w+b") as data:
        with tarfile.open(fileobj=data, mode="w") as archive:  # large enough for packets of the maximum size
            entry = tarfile.TarInfo("data")
            entry.size = PIECE
            archive.addfile(entry, io.BytesIO(os.urandom(PIECE)))
        data.flush()
        paths = new_paths(probe, Path(folder))
        run = paths.shared
        try:
            paths.create(owner=users.nodes_of(probe.user))
            inventory, own = swarm.inventory(probe, run, run_image=False)
            probe_plan = plan(probe, inventory, replace(own, code=str(run)), paths.root.name, MASTER_PORT)
            session = swarm.open(probe, probe_plan, run, warn=print_message)
            try:
                session.up(probe_plan)
                placed = {name: swarm.manager.host(task) for name, task in session.nodes.items()}
                for name, host in sorted(placed.items(), key=lambda item: item[::-1]):
                    yield from check_node(session, name, host, data)
                for host in sorted(hosts - {*placed.values()}):
                    yield Finding(
                        WARNING, f"{host}: Swarm placed no test node on it, so it was not checked", "run doctor again"
                    )
            finally:
                session.down(1)
        finally:
            records.forget(paths.root)


def check_node(session: SwarmSession, node: str, host: str, data: BinaryIO) -> Iterator[Finding]:
    """Report whether a test node on `host` can be reached, its clock, and whether large packets arrive."""
    if not (link := session.reach(node)):
        yield Finding(
            BAD, f"{host}: a test node on it does not respond", "open 4789/udp and 7946/udp between the hosts"
        )
        return
    try:
        before = time.time()
        skew = link.converse(protocol.GetStatus(), protocol.Status).time - (before + time.time()) / 2
        if abs(skew) > MAX_CLOCK_SKEW:
            yield Finding(WARNING, f"{host}: its clock differs by {skew:+.1f} s", "set up NTP (chrony, timesyncd)")
        send_archive(link, "/var/tmp/doctor", data, digest(data))
        yield Finding(GOOD, f"{host}: has the image, and a test node on it responds over an overlay network")
    except (OSError, EngineError):
        hint = "packets of the overlay network exceed the MTU between the hosts: see docs/swarm.md, Network"
        yield Finding(BAD, f"{host}: small packets arrive, large ones do not", hint)
    finally:
        link.close()
