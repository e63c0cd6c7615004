"""Export a job as a Compose file: the project's docker-compose.yml with all variables filled in."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import yaml

from orchestrate.engines.docker import program
from orchestrate.engines.docker.compose_override import literal
from orchestrate.engines.docker.folders import given_mounts, note_writable
from orchestrate.engines.docker.mounts import CODE, check_script, masks
from orchestrate.errors import UsageError
from orchestrate.export import Shape, check_folders, document, quoted, shape
from orchestrate.files.paths import JOB, PROJECT, code_folder, is_text
from orchestrate.host import owners, users
from orchestrate.plan import container
from orchestrate.plan.limits import limits
from orchestrate.spec.folders import data_paths, data_variables
from orchestrate.spec.spec import JobSpec

VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
MAX_NAMED = 10  # files that nodes cannot read
DROPPED_KEYS = ("profiles", "build")


def compose(spec: JobSpec, name: str) -> str:
    """Return a Compose file for `docker compose up`; raises UsageError for settings that cannot be exported."""
    job = shape(spec, name, here=True)
    code, run = (_mountable(folder) for folder in (code_folder(spec.command), _run(name)))
    hidden = masks(Path(code), Path(run).parent, CODE, spec.chdir)
    check_script(hidden, spec.command, spec.chdir)
    mounts = [*hidden, *given_mounts(spec, Path(run).parent)]
    note_writable(spec)
    user, node = users.nodes_of(spec.user), program.folder(spec)
    closed = _unreadable(Path(code), {mount["target"] for mount in hidden}, user)
    bounds = limits(spec.memory, 0, job.nodes)
    values = {
        "JOB_ID": name,
        "NODE_IMAGE": spec.image,
        "NODE_CODE": code,
        "NODE_USER": "{}:{}".format(*user or (os.getuid(), os.getgid())),
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
        content = {key: value for key, value in file["services"][service + kind].items() if key not in DROPPED_KEYS}
        filled = _filled(content, values)
        if service != "outcome":
            filled["command"] = [literal(word) for word in spec.command_line]
            filled["environment"] |= _environment(spec, job) | _data(spec)
            filled["volumes"] = [_mount(volume, f"{run}/{JOB}", node) for volume in filled["volumes"]]
            filled["volumes"] += [_literal(mount) for mount in mounts]
            filled["working_dir"] = literal(os.path.normpath(f"{CODE}/{spec.chdir}"))
            filled["stop_grace_period"] = f"{container.stop_seconds(spec.grace)}s"
            filled["networks"] = {"job": {"aliases": [service]}}
        filled["labels"] = dict.fromkeys(filled["labels"], "")  # otherwise `ps` lists it as a job of ours
        filled["depends_on"] = _renamed(filled.get("depends_on", {}))
        services[service] = filled
    whole = {
        "name": name,
        "services": services,
        "networks": {"job": {"driver_opts": file["networks"]["job"]["driver_opts"]}},
    }
    return "".join(f"# {line}\n" for line in _head(spec, job, run, user, closed)) + document(whole)


def _head(spec: JobSpec, job: Shape, run: str, user: tuple[int, int] | None, closed: list[str]) -> list[str]:
    owner = "-o {} -g {} ".format(*user) if user else ""
    lines = [
        f"{job.name}: run it with docker compose --file FILE up, and remove it with docker compose --file FILE down.",
        "First create the folder for its files, inside one that other users cannot enter:",
        f"  mkdir -p {quoted(os.path.dirname(run))} && mkdir -m 700 {quoted(run)} && "
        f"install -d {owner}{quoted(f'{run}/{JOB}')}",
    ]
    if user and closed:
        names = ", ".join(map(quoted, closed[:MAX_NAMED])) + ", ..." * (len(closed) > MAX_NAMED)
        lines += [
            f"Nodes run as user {user[0]}, who cannot read {names} in the code folder.",
            "chmod a+rX opens a file to all users of this machine, and chmod -R a+rX a folder with all that is in it.",
        ]
    lines.append("The working directory is read-only: results belong into the folder that JOB_DIR names.")
    if job.secrets:
        lines.append(f"Set in the environment of docker compose: {', '.join(job.secrets)}.")
    if spec.max_run:
        lines.append("Compose does not support max_run: start the job with `timeout` instead.")
    return lines


def _unreadable(code: Path, hidden: set[str], user: tuple[int, int] | None) -> list[str]:
    """Return what a user cannot read of a code folder: the folder (`.`), and what is directly in it and not hidden."""
    names = sorted(os.listdir(code)) if user and code.is_dir() else []
    paths = [code, *(code / name for name in names if not name.startswith(".") and f"{CODE}/{name}" not in hidden)]
    there = [path for path in paths if path.exists() and not path.is_symlink()]
    return [os.path.relpath(path, code) for path in there if user and not users.can_read(path, *user)]


def _run(name: str) -> Path:
    """Return the run directory, which may not exist yet; raises UsageError if it leads to another folder."""
    run = Path.cwd() / "runs" / name
    check_folders(run.parent, run, run / JOB)
    return owners.check(run)


def _mountable(folder: Path) -> str:
    if not is_text(str(folder)):
        raise UsageError(f"{ascii(str(folder))} cannot be mounted: its name is not UTF-8", "use another folder")
    return str(folder)


def _environment(spec: JobSpec, job: Shape) -> dict[str, str]:
    """Return the job's `env`; secrets are variables that Compose substitutes when it starts the job."""
    own = {} if spec.expand else {"WORKER_EXPAND": "false"}
    env = spec.env.items()
    return own | {key: f"${{{key}:?set {key}}}" if key in job.secrets else literal(value) for key, value in env}


def _data(spec: JobSpec) -> dict[str, str]:
    """Return the variables with the paths of the job's data."""
    return {name: literal(path) for name, path in data_variables(data_paths(spec)).items()}


def _literal(mount: dict[str, Any]) -> dict[str, Any]:
    """Return a mount whose paths have no variables."""
    return mount | {key: literal(mount[key]) for key in ("source", "target") if key in mount}


def _mount(volume: Any, files: str, node: Path) -> Any:
    """Return a mount with absolute paths, and with the job folder instead of the volume `job`."""
    if volume == "job:/job":
        return {"type": "bind", "source": literal(files), "target": "/job", "bind": {"create_host_path": False}}
    if volume.get("source") == "./orchestrate":
        return volume | {"source": literal(str(node))}
    return volume


def _filled(value: Any, values: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _filled(part, values) for key, part in value.items()}
    if isinstance(value, list):
        return [_filled(part, values) for part in value]
    if isinstance(value, str):
        return VARIABLE.sub(lambda match: literal(values.get(match[1], match[2] or "")), value)
    return value


def _renamed(depends: Any) -> Any:
    if isinstance(depends, list):
        return [name.removesuffix("-cpu") for name in depends]
    return {name.removesuffix("-cpu"): value for name, value in depends.items()}
