"""Export a job as a file for Kubernetes, Slurm, or Compose.

Turns a spec into text, and creates nothing. On each target, a node runs `orchestrate/node` without an orchestrator, so
workers have the same environment as under the orchestrator, and the job folder has the same checkpoints and logs.
"""

from __future__ import annotations

import math
import os
import re
import shlex
from pathlib import Path
from typing import Any

import yaml

from orchestrate.dataclass import dataclass
from orchestrate.engines.base import ignoring
from orchestrate.errors import UsageError
from orchestrate.plan.container import UNBUFFERED
from orchestrate.spec.folders import is_url
from orchestrate.spec.redact import secret_names
from orchestrate.spec.sizes import UNLIMITED
from orchestrate.spec.source import GIT
from orchestrate.spec.spec import IMAGE, JobSpec

UNQUOTED = re.compile(r"-{0,2}[A-Za-z/]|\d+[KMG]i$")  # the start of text that needs no quotes, or a size


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Number of nodes, resources and environment of a job, for any target."""

    name: str
    nodes: int
    nproc: int  # workers on each node
    gpus: int  # on each node
    env: dict[str, str]
    memory: str  # limit of each node; empty if unlimited
    secrets: tuple[str, ...]  # environment variables whose values are not exported


OF_SUPERVISOR = ("spares", "min_trainers", "on_event", "rules", "hang_after", "require_communication")
BROUGHT = ("before", "virtual_local_rank", "sagemaker", "services", "ports", "labels", "isolated", "stdin")


def shape(spec: JobSpec, name: str, here: bool = False) -> Shape:
    """Return the shape of a job without access to the target machines; `here` is whether that is this one.

    Raises UsageError if the spec leaves open what depends on them, or has settings that cannot be exported.
    """
    nodes = spec.trainers + 1
    if isinstance(spec.gpus, int):
        if spec.gpus % nodes:
            raise UsageError(f"{spec.gpus} GPUs cannot be divided evenly among {nodes} nodes", f"--gpus {nodes}")
        gpus = spec.gpus // nodes
        nproc = spec.nproc_per_node or gpus
        if nproc != gpus:
            raise UsageError(
                f"{nproc} workers and {gpus} GPUs per node", "each worker uses one GPU: remove nproc_per_node or gpus"
            )
    else:
        nproc = spec.nproc_per_node or 1
        gpus = nproc if spec.gpus == "all" else 0
    _check(spec, here)
    env = {
        "NODE_MODE": "static",
        "NODE_NPROC": str(nproc),
        "NNODES": str(nodes),
        "NODE_GRACE": f"{spec.grace:g}",
        "JOB_ID": name,
        "TORCHELASTIC_RUN_ID": name,
        "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
        **UNBUFFERED,
    }
    if not gpus:
        env["CUDA_VISIBLE_DEVICES"] = ""
    if not spec.expand:
        env["WORKER_EXPAND"] = "false"
    if spec.cpus:
        env["OMP_NUM_THREADS"] = str(max(1, int(spec.cpus) // nproc))
    found = secret_names(spec.env, spec.secrets)
    secrets = tuple(key for key in spec.env if key in found)
    env |= {key: value for key, value in spec.env.items() if key not in secrets}
    memory = "" if spec.memory == UNLIMITED else spec.memory or ""
    return Shape(name=name, nodes=nodes, nproc=nproc, gpus=gpus, env=env, memory=memory, secrets=secrets)


def _check(spec: JobSpec, here: bool) -> None:
    """Raise UsageError for settings that cannot be exported, or only for this machine."""
    if spec.pin or spec.share_gpus or spec.queue or spec.network == "host":
        raise UsageError(
            "pin, share_gpus, queue and network cannot be exported", "remove them: they are for this machine only"
        )
    if spec.pip or spec.dockerfile:
        hint = "build an image that contains the packages, push it, and set image"
        raise UsageError("pip, requirements and dockerfile cannot be exported", hint)
    if spec.checkpoints or spec.output:
        hint = "remove them; scripts can access the store themselves"
        raise UsageError("checkpoints and output need orchestrate while the job runs", hint)
    if any(map(is_url, spec.data.values())):
        raise UsageError("data in an object store is fetched by orchestrate", "fetch it, and name its folder")
    if not here and (spec.data or spec.mounts or spec.chdir):
        hint = "remove what is set of them, and add the target's own to the exported file"
        raise UsageError("data, mounts and chdir are exported only to Compose", hint)
    if spec.source.startswith(GIT):
        raise UsageError("a source in a Git repository cannot be exported", "check it out, and use its folder")
    if [*map(spec.mask(), spec.command_line)] != [*spec.command_line]:
        raise UsageError("a command with a secret cannot be exported", "let the script read it from its variable")
    texts = {"image": spec.image, "volume": spec.volume} | {f"slurm.{name}": text for name, text in spec.slurm.items()}
    if shown := [key for key, text in texts.items() if spec.mask()(text) != text]:
        raise UsageError(f"{shown[0]} is a secret, and cannot be exported", "write another value, or remove it")
    if spec.files:
        raise UsageError("secrets as files cannot be exported", "use env, and list their names in secrets")
    if brought := [key for key in BROUGHT if getattr(spec, key)]:
        raise UsageError(
            f"{', '.join(brought)} cannot be exported", "remove them from the job file, and edit the exported file"
        )
    ignoring(spec, OF_SUPERVISOR, "an exported job, which has no supervisor,")
    if spec.constraints or spec.encrypt:
        raise UsageError(
            "constraints and encrypt are for Swarm only",
            "remove them, and add the target's equivalents to the exported file",
        )


def check_folders(*folders: Path) -> None:
    """Raise UsageError if one of the folders is something else: for example, a link that came with the code."""
    for folder in folders:
        if os.path.lexists(folder) and (folder.is_symlink() or not folder.is_dir()):
            what = "a link" if folder.is_symlink() else "not a folder"
            raise UsageError(f"{folder} is {what}", "remove it, or export under another --name or from another folder")


def document(*objects: Any) -> str:
    """Dump objects as YAML whose strings every parser reads as strings."""
    return yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, width=math.inf)


class _Dumper(yaml.SafeDumper):
    """Quotes strings that Go's libraries read as a number or a boolean and PyYAML does not: 1e3, 0o17, y."""

    def ignore_aliases(self, data: Any) -> bool:
        """Never write aliases."""
        return True


def _text(dumper: _Dumper, value: str) -> yaml.ScalarNode:
    plain = UNQUOTED.match(value) and value.lower() not in ("y", "n") and "\n" not in value
    style = None if plain else '"' if "\n" in value else "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style)


_Dumper.add_representer(str, _text)


def carries_node(image: str) -> bool:
    """Whether an image is the project's own, by its name, and so contains `orchestrate/node`."""
    return image.rpartition("/")[2].partition(":")[0].partition("@")[0] == IMAGE.partition(":")[0]


def quoted(text: str) -> str:
    """Quote text for bash; unprintable characters are escaped, since sbatch rejects DOS line breaks."""
    if text.isprintable():
        return shlex.quote(text)
    return "$'" + "".join(map(_escaped, text)) + "'"


def _escaped(char: str) -> str:
    if char.isprintable() and char not in "\\'":
        return char
    return "".join(f"\\{byte:03o}" for byte in char.encode(errors="surrogateescape"))
