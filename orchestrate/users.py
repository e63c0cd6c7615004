"""Who nodes run as: you; and where you are root, someone who is not."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from orchestrate.errors import UsageError
from orchestrate.spec import JobSpec

NODE = (1000, 1000)  # user and group of the image, and of the Compose file


def nodes_of(spec: JobSpec, environ: Mapping[str, str] = os.environ) -> tuple[int, int] | None:
    """The user and group ids that nodes run as; None for those of whoever starts the job.

    For root it is whoever called sudo, else the user of the image: what root's nodes leave could be set-user-id root.
    Raises UsageError where another user is asked for by one who is not root.
    """
    if spec.user != "auto":
        user, _, group = ("0:0" if spec.user == "root" else spec.user).partition(":")
        asked = int(user), int(group or user)
        if os.geteuid() not in (0, asked[0]):
            raise UsageError(f"user is {spec.user}, and you are not root", "leave it out: nodes run as you")
        return asked
    if os.geteuid():
        return None
    sudo = environ.get("SUDO_UID", ""), environ.get("SUDO_GID", "")
    if all(number.isdecimal() and int(number) for number in sudo):
        return int(sudo[0]), int(sudo[1])
    return NODE


def can_read(path: Path, user: int, group: int) -> bool:
    """Whether a file can be read, or a folder entered, by its mode alone."""
    status = path.stat()
    shift = 6 if status.st_uid == user else 3 if status.st_gid == group else 0
    wanted = 5 if stat.S_ISDIR(status.st_mode) else 4
    return user == 0 or (status.st_mode >> shift) & wanted == wanted
