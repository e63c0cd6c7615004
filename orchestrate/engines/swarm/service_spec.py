"""Bodies of the API requests that create a job's services on Docker Swarm. Pure."""

from __future__ import annotations

import io
import re
import tarfile
import zlib
from collections.abc import Iterable
from typing import Any

from orchestrate.engines.docker import labels
from orchestrate.engines.docker.program import files
from orchestrate.engines.docker.volumes import WIPED, checked
from orchestrate.files.paths import PACKAGE
from orchestrate.plan import container
from orchestrate.plan.plan import Plan
from orchestrate.spec.sizes import UNLIMITED, parse_size
from orchestrate.spec.spec import JobSpec

PROGRAM = "/run/orchestrate"  # where the node program is unpacked
CODE, JOB, SHARED = "/var/tmp/code", "/var/tmp/job", "/shared"  # /var/tmp exists in every image, for every user
PORT, SPREAD = 20000, 9000
GPU = "NVIDIA-GPU"  # generic resource that hosts offer; see docs/swarm.md
NANOSECONDS = 1_000_000_000  # in a second
SECRETS = f"{PROGRAM}/secrets"  # secret files of the job; the folder of Swarm's own secrets is read-only
PROGRAM_SPACE = 16 << 20  # bytes for the node program


def boot(source: str) -> str:
    """Return Python code that unpacks the node program and executes it with the same arguments."""
    return (
        "import os, sys, tarfile; "
        f"tarfile.open('{source}').extractall('{PROGRAM}'); "
        f"os.execv(sys.executable, [sys.executable, '{PROGRAM}/orchestrate/node', *sys.argv[1:]])"
    )


def program() -> bytes:
    """Return the node program as a tar file to send as a Docker secret, Swarm's only way to copy a large file to nodes.

    It is not confidential, as workers can read it; so it does not contain the node's key.
    """
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        for path in files():
            archive.add(path, path.relative_to(PACKAGE.parent))
    return file.getvalue()


def port(spec: JobSpec, project: str) -> int:
    """Return the port of the relay; nodes listen on the ports after it.

    On the network of the hosts, which other jobs share, the port is derived from the job's name, and each node has a
    different one.
    """
    return PORT if spec.network != "host" else PORT + 1 + zlib.crc32(project.encode()) % SPREAD


def task(
    spec: JobSpec,
    plan: Plan,
    role: str,
    *,
    image: str,
    user: str,
    network: str,
    secret: tuple[str, str],
    key: bytes,
    volumes: Iterable[str] = (),
) -> dict[str, Any]:
    """Return the template of a service's tasks, each of which is a node.

    `role` is master or trainer, `user` is UID:GID, `network` is an id, `secret` an id and a name; `key` is the job's
    key, and `volumes` are declared by the image. Raises ResourceError for unsupported volumes.
    """
    uid, _, gid = user.partition(":")
    host = spec.network == "host"
    mounts = _mounts(spec)
    declared = checked(spec.image, volumes, [mount["Target"] for mount in mounts])
    env = _environment(spec, plan, role, key) | {"NODE_WIPE": " ".join([*WIPED, "/var/tmp", PROGRAM, *declared])}
    name = "master" if role == "master" else f"{plan.project}-{role}-{{{{.Task.Slot}}}}"
    node = {
        "Image": image,
        "Command": ["python", "-c", boot("/run/secrets/node")],
        **({"Hostname": name} if not host else {}),
        "Env": [f"{key}={value}" for key, value in env.items()],
        "Dir": "/var/tmp",
        "Labels": labels.only({labels.ROLE: role}) | spec.labels,
        "Healthcheck": {"Test": ["NONE"]},  # an image's own check would see the job's key in its environment
        "User": user,
        "Init": False,  # the node is process 1, as in docker-compose.yml
        "ReadOnly": True,
        "OomScoreAdj": container.OOM_SCORE_ADJ,  # since Docker 27; ignored by earlier versions
        "CapabilityDrop": ["ALL"],
        "Privileges": {"NoNewPrivileges": True},
        "Mounts": mounts,
        "StopSignal": "SIGTERM",  # whatever the image says
        "StopGracePeriod": container.stop_seconds(spec.grace) * NANOSECONDS,
        "Ulimits": [{"Name": "core", "Soft": 0, "Hard": 0}],
        "Secrets": [
            {
                "SecretID": secret[0],
                "SecretName": secret[1],
                "File": {"Name": "node", "UID": uid, "GID": gid, "Mode": 0o400},
            }
        ],
    }
    return {
        "ContainerSpec": node,
        "Resources": _resources(spec, plan),
        "RestartPolicy": {"Condition": "none"},  # a new node has no worker: the gang restarts as a whole
        "Placement": {"Constraints": list(spec.constraints)},  # Swarm spreads tasks by default
        "Networks": [{"Target": network} if host else {"Target": network, "Aliases": [role]}],
        "LogDriver": {"Name": "json-file", "Options": container.LOG_OPTIONS},
    }


def _environment(spec: JobSpec, plan: Plan, role: str, key: bytes) -> dict[str, str]:
    listens = str(port(spec, plan.project) + 1)
    if spec.network == "host" and role != "master":
        listens += "+{{.Task.Slot}}"
    return {
        "JOB_ID": plan.project,
        "NODE_MODE": "agent",
        "NODE_GRACE": f"{spec.grace:g}",
        "NODE_PRELOAD": " ".join(plan.placement.preload),
        "NODE_PORT": listens,
        "NODE_KEY": key.hex(),
        **container.ENVIRONMENT,
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def _mounts(spec: JobSpec) -> list[dict[str, Any]]:
    # Swarm mounts tmpfs with noexec, but compilers execute files in /tmp, so that is a volume. Options of the driver
    # `local` could put it in memory, but volumes with options stay on their host after the task.
    mounts: list[dict[str, Any]] = [
        {"Type": "volume", "Target": "/tmp"},
        {"Type": "volume", "Target": "/var/tmp"},
        {"Type": "tmpfs", "Target": PROGRAM, "TmpfsOptions": {"Mode": 0o1777, "SizeBytes": PROGRAM_SPACE}},
        {
            "Type": "tmpfs",
            "Target": "/dev/shm",
            "TmpfsOptions": {"Mode": 0o1777, "SizeBytes": parse_size(spec.shm_size)},
        },
    ]
    if spec.volume:
        kind = "bind" if spec.volume.startswith("/") else "volume"
        mounts.append({"Type": kind, "Source": spec.volume, "Target": SHARED})
    return mounts


def _resources(spec: JobSpec, plan: Plan) -> dict[str, Any]:
    reserved: dict[str, Any] = {}
    if spec.cpus:
        reserved["NanoCPUs"] = int(spec.cpus * NANOSECONDS)
    limits = {**reserved, "Pids": plan.limits.processes}
    if plan.limits.memory:
        limits["MemoryBytes"] = plan.limits.memory
    if spec.memory not in (None, UNLIMITED):  # a default share is a limit, but not reserved
        reserved["MemoryBytes"] = plan.limits.memory
    if plan.gpus:
        resource = {"Kind": GPU, "Value": plan.nproc_per_node}
        reserved["GenericResources"] = [{"DiscreteResourceSpec": resource}]
    return {"Limits": limits, "Reservations": reserved}


def explain_error(error: str, host: str, image: str) -> tuple[str, str]:
    """Convert Swarm's error about a task that fails to start to a message and a hint."""
    if re.search(r"No such image|pull access denied|manifest unknown|not found: manifest", error):
        return f"{host} has no image {image}", f"docker save {image} | ssh {host} docker load; or push it to a registry"
    if "no suitable node" in error:
        return (
            f"no suitable host for a node: {error.partition('(')[2].rstrip(')') or error}",
            "see docs/swarm.md, Where nodes go",
        )
    if "bind source path does not exist" in error or "invalid mount" in error:
        return f"{host}: {error}", "if volume is a path, it must exist on every host"
    return f"{host}: {error}", ""
