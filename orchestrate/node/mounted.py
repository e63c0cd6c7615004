"""What must be mounted in a node before it starts a worker: a job may have replaced a folder of this machine."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable

from orchestrate.node.messages.checks import Refused, shown
from orchestrate.node.trees import identity


def check(folders: dict[str, str]) -> None:
    """Raise Refused for a folder or file with another identity than expected."""
    for path, expected in folders.items():
        try:
            found = identity(os.stat(path))
        except OSError as error:
            raise Refused(f"start: folders: {shown(path)} cannot be read: {error.strerror}") from None
        if found != expected:
            raise Refused(f"start: folders: {shown(path)} is not the folder that the orchestrator sees")


def missing(masks: Iterable[str]) -> str:
    """Return the first mask that is not at its path, since a link led it elsewhere; empty if all are.

    What is mounted over a path is on another device than the folder around it.
    """
    for path in masks:
        try:
            status = os.lstat(path)
            if stat.S_ISLNK(status.st_mode) or status.st_dev == os.lstat(os.path.dirname(path)).st_dev:
                return path
        except OSError:
            return path
    return ""
