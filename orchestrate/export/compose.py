"""A job as a plain Compose file: that of this project, with everything filled in."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import yaml

from orchestrate.errors import UsageError
from orchestrate.export import shape
from orchestrate.limits import limits
from orchestrate.paths import PACKAGE, PROJECT, code_folder
from orchestrate.spec import JobSpec

VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
DROPPED = ("profiles", "build")


def compose(spec: JobSpec, name: str) -> str:
    """The file; `docker compose up` runs it."""
    job = shape(spec, name)
    for folder in (code_folder(spec.command), Path.cwd()):
        if ":" in str(folder):
            raise UsageError(f"{folder} cannot be mounted, for the colon in it", "take another folder")
    bounds = limits(spec.memory, 0, job.nodes)
    values = {
        "JOB_ID": name,
        "NODE_IMAGE": spec.image,
        "NODE_CODE": str(code_folder(spec.command)),
        "NODE_JOB_DIR": str(Path.cwd() / "runs" / name),
        "NODE_USER": f"{os.getuid()}:{os.getgid()}",
        "NODE_SHM": spec.shm_size,
        "NODE_MEMORY": job.memory or "0",
        "NODE_TMP": str(bounds.tmp),
        "NODE_PIDS": str(bounds.processes),
        "NODE_CPUS": str(spec.cpus or 0),
        "NODE_GRACE": f"{spec.grace:g}",
        "NPROC_PER_NODE": str(job.nproc),
        "TRAINERS": str(spec.trainers),
    }
    file = yaml.safe_load((PROJECT / "docker-compose.yml").read_text())
    kind = "" if job.gpus else "-cpu"
    services = {}
    for service in ("master", "trainer", "outcome"):
        content = {key: value for key, value in file["services"][service + kind].items() if key not in DROPPED}
        filled = _filled(content, values)
        if service != "outcome":
            filled["command"] = [word.replace("$", "$$") for word in spec.command]  # Compose would look them up
            filled["environment"] |= {key: value.replace("$", "$$") for key, value in spec.env.items()}
            mounts = [volume.replace("./orchestrate", str(PACKAGE)) for volume in filled["volumes"]]
            filled["volumes"] = [mount.replace("$", "$$") for mount in mounts]
            filled["stop_grace_period"] = f"{int(spec.grace) + 10}s"
            filled["networks"] = {"job": {"aliases": [service]}}
            filled["labels"] = {"orchestrate.job": ""}  # else `ps` would take it for a job that we supervise
        filled["depends_on"] = _renamed(filled.get("depends_on", {}))
        services[service] = filled
    whole = {
        "name": name,
        "services": services,
        "networks": {"job": {"driver_opts": file["networks"]["job"]["driver_opts"]}},
    }
    head = (
        f"# {name}: docker compose --file THIS up. Its files come to {values['NODE_JOB_DIR']}, which must be there.\n"
    )
    if spec.max_run:
        head += "# Compose knows no max_run: put `timeout` before its command.\n"
    return head + yaml.safe_dump(whole, sort_keys=False, width=10_000)


def _filled(value: Any, values: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _filled(part, values) for key, part in value.items()}
    if isinstance(value, list):
        return [_filled(part, values) for part in value]
    if isinstance(value, str):
        return VARIABLE.sub(lambda match: values.get(match[1], match[2] or ""), value)
    return value


def _renamed(depends: Any) -> Any:
    if isinstance(depends, list):
        return [name.removesuffix("-cpu") for name in depends]
    return {name.removesuffix("-cpu"): value for name, value in depends.items()}
