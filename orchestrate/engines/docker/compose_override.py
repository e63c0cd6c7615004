"""The Compose file that adds a job's own settings to docker-compose.yml. Pure."""

from __future__ import annotations

from typing import Any

import yaml

from orchestrate.engines.docker.mounts import is_mask
from orchestrate.errors import UsageError
from orchestrate.node import trees
from orchestrate.spec.spec import JobSpec

PATHS = ("source", "target")  # of a mount
SECRETS = "/run/secrets"  # folder in nodes for secret files
SECRETS_SPACE = "1m"
MAX_MASKS = 100_000  # characters of their packed paths: Linux limits a variable to 128 KiB


def document(spec: JobSpec, mounts: list[dict[str, Any]], devices: dict[str, Any], user: str) -> str:
    """Return the Compose file; `mounts` and `devices` are added to every node, and Compose expands no variables.

    `user` is that of the nodes, UID:GID. Raises UsageError if the mounts have too many masks.
    """
    uid, _, gid = user.partition(":")
    node = {
        "volumes": [{key: literal(value) if key in PATHS else value for key, value in each.items()} for each in mounts],
        # Not a mode for all users: runc ignores it when a container starts again.
        "tmpfs": [f"{SECRETS}:size={SECRETS_SPACE},mode=0700,uid={uid},gid={gid},nosuid,nodev,noexec"],
        "labels": {name: literal(value) for name, value in spec.labels.items()},
        **devices,
    }
    masks = trees.packed([mount["target"] for mount in mounts if is_mask(mount)])
    if len(masks) > MAX_MASKS:
        what = f"nodes cannot be told all {len(mounts)} sockets, pipes, run directories and files to hide"
        raise UsageError(what, "list their folders in .dockerignore, or use another folder")
    node["environment"] = {"NODE_MASKS": masks}
    ports = {"ports": [f"127.0.0.1:{pair}" for pair in spec.ports]} if spec.ports else {}
    networks = {"networks": {"job": {"internal": True}}} if spec.isolated else {}
    return yaml.safe_dump({"services": {"master": node | ports, "trainer": node}, **networks})


def literal(text: str) -> str:
    """Escape text, so that Compose expands no variables in it."""
    return text.replace("$", "$$")
