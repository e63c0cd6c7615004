"""Files for engines that others maintain: the same job on Kubernetes, on Slurm, or by Compose alone.

From a spec to text; nothing is made. In each of them a node is `orchestrate/node` without an orchestrator: so the
workers' environment is the same as here, and so are checkpoints and logs in the job's folder.
"""

from __future__ import annotations

import math
import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from orchestrate.errors import UsageError
from orchestrate.job.container import UNBUFFERED
from orchestrate.job.limits import UNLIMITED
from orchestrate.job.redact import secret_names
from orchestrate.job.spec import IMAGE, JobSpec

PLAIN = re.compile(r"-{0,2}[A-Za-z/]|\d+[KMG]i$")  # how text begins that may do without quotes; or a size


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How a job looks from outside."""

    name: str
    nodes: int
    nproc: int  # workers on each node
    gpus: int  # on each node
    env: dict[str, str]
    memory: str  # limit of each node; empty for none
    secrets: tuple[str, ...]  # names of the job's environment whose values are not written down


def shape(spec: JobSpec, name: str) -> Shape:
    """The shape of a job on machines that cannot be asked what they have; raises UsageError where that must be said."""
    nodes = spec.trainers + 1
    if isinstance(spec.gpus, int):
        if spec.gpus % nodes:
            raise UsageError(f"{spec.gpus} GPUs cannot be shared out evenly to {nodes} nodes", f"--gpus {nodes}")
        gpus = spec.gpus // nodes
        nproc = spec.nproc_per_node or gpus
        if nproc != gpus:
            raise UsageError(
                f"{nproc} workers and {gpus} GPUs on a node", "a worker has one GPU: leave one of them out"
            )
    else:
        nproc = spec.nproc_per_node or 1
        gpus = nproc if spec.gpus == "all" else 0
    if spec.pin or spec.share_gpus or spec.network == "host":
        raise UsageError("pin, share_gpus and network are for this machine", "leave them out of a job that you export")
    if spec.constraints or spec.encrypt:
        raise UsageError(
            "constraints and encrypt are Swarm's",
            "leave them out, and say in the file what the other engine has for them",
        )
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


def check_folders(*folders: Path) -> None:
    """Raise UsageError for a folder of files that is something else: a link, for example, that came with the code."""
    for folder in folders:
        if os.path.lexists(folder) and (folder.is_symlink() or not folder.is_dir()):
            what = "a link" if folder.is_symlink() else "not a folder"
            raise UsageError(f"{folder} is {what}", "remove it, or export under another --name or from another folder")


def document(*objects: Any) -> str:
    """Objects as YAML, in which text is text for every reader."""
    return yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, width=math.inf)


class _Dumper(yaml.SafeDumper):
    """Quotes what Go's libraries would take for a number or a truth, and PyYAML would not: 1e3, 0o17, y."""

    def ignore_aliases(self, data: Any) -> bool:
        """Write what appears twice in full."""
        return True


def _text(dumper: _Dumper, value: str) -> yaml.ScalarNode:
    plain = PLAIN.match(value) and value.lower() not in ("y", "n") and "\n" not in value
    style = None if plain else '"' if "\n" in value else "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style)


_Dumper.add_representer(str, _text)


def carries_node(image: str) -> bool:
    """Whether an image is one of ours, by its name, and so holds the program of a node."""
    return image.rpartition("/")[2].partition(":")[0].partition("@")[0] == IMAGE.partition(":")[0]


def quoted(text: str) -> str:
    """Text as a word for bash; what is not printable as escapes, since sbatch takes no line breaks of DOS."""
    if text.isprintable():
        return shlex.quote(text)
    return "$'" + "".join(map(_escaped, text)) + "'"


def _escaped(char: str) -> str:
    if char.isprintable() and char not in "\\'":
        return char
    return "".join(f"\\{byte:03o}" for byte in char.encode())
