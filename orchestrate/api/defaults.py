"""Defaults of a user for all jobs: a job file in the user's configuration folder."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

from orchestrate.errors import UsageError
from orchestrate.spec.layers import read_file

NAME = ("orchestrate", "defaults.yaml")  # in XDG_CONFIG_HOME or ~/.config
OF_JOBS = ("command", "name", "source", "chdir")  # keys that only a job can have

OF_ENGINES = ("memory", "cpus", "shm_size", "pin", "keep", "labels")  # keys that are ignored by engines without them


def layer() -> dict[str, Any]:
    """Return the user's defaults as keys of a job file; raises UsageError if they are invalid."""
    folder = os.environ.get("XDG_CONFIG_HOME", "")
    path = Path(folder if os.path.isabs(folder) else os.path.expanduser("~/.config"), *NAME)
    if not path.is_file():
        return {}
    for each in (path, path.parent):  # a command of `on_event` runs as this account
        status = each.stat()
        if status.st_uid not in (0, os.geteuid()) or status.st_mode & stat.S_IWOTH:
            hint = f"check it, and make it yours: chown {os.geteuid()} {path.parent} {path}"
            raise UsageError(f"{path} is not used: another account can change {each}", hint)
    found = read_file(path)
    if wrong := [key for key in OF_JOBS if key in found]:
        raise UsageError(f"{path} sets {wrong[0]}, which has no default", "set it in a job file")
    return found
