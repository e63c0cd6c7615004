"""The user that nodes run as: you, or an unprivileged user if you are root."""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import re
import stat
from collections.abc import Mapping
from pathlib import Path

from orchestrate.errors import UsageError
from orchestrate.files.folder import allows, allows_reading

NO_ID = (1 << 32) - 1  # means "unchanged" to chown(2)
INITIAL_NAMESPACE = 0xEFFFFFFC  # of process IDs, in include/linux/proc_ns.h: that of the machine
FREE = range(61000, 61184)  # ids that neither useradd nor systemd assigns: https://systemd.io/UIDS-GIDS


def nodes_of(user: str, environ: Mapping[str, str] = os.environ) -> tuple[int, int] | None:
    """User and group ids that nodes run as with the value `user` of a job file; None for those of the caller.

    For root, that is the user who called sudo, otherwise one without an account: nodes of root could leave set-user-ID
    programs behind, and an account could signal nodes that run as it and read their environment.
    Raises UsageError if a caller other than root asks for another user.
    """
    if chosen := asked(user):
        if os.geteuid() not in (0, chosen[0]):
            raise UsageError(f"user is {user}, but you are not root", "remove user to run nodes as yourself")
        return chosen
    if os.geteuid():
        return None
    return sudo(environ) or without_account()


def alone() -> bool:
    """Whether this is a container of a CI system in which only root has processes: no other account can act.

    GitLab's runners, for example, create folders there that every user can change.
    """
    if not os.environ.get("CI"):
        return False
    with contextlib.suppress(OSError):
        return os.stat("/proc/self/ns/pid").st_ino != INITIAL_NAMESPACE and not any(
            map(_of_others, os.listdir("/proc"))
        )
    return False


def _of_others(name: str) -> bool:
    with contextlib.suppress(OSError):  # it has just ended
        return name.isdigit() and os.stat(f"/proc/{name}").st_uid != 0
    return False


def asked(user: str) -> tuple[int, int] | None:
    """User and group ids of the value `user` of a job file; None for `auto`."""
    if user == "auto":
        return None
    number, _, group = ("0:0" if user == "root" else user).partition(":")
    return int(number), int(group or number)


def sudo(environ: Mapping[str, str] = os.environ) -> tuple[int, int] | None:
    """User and group ids of the user who called sudo; None without sudo."""
    ids = environ.get("SUDO_UID", ""), environ.get("SUDO_GID", "")
    if all(re.fullmatch("[1-9][0-9]{0,9}", number) and int(number) < NO_ID for number in ids):
        return int(ids[0]), int(ids[1])
    return None


def without_account() -> tuple[int, int]:
    """A user id and group id that no account of this machine has; raises UsageError if none is left."""
    for number in FREE:
        if not account(number) and not _group(number):
            return number, number
    raise UsageError(
        f"all user IDs from {FREE[0]} to {FREE[-1]} are taken",
        "use --set user=UID:GID to select the user of nodes",
    )


def account(user: int) -> str:
    """The name of a user id's account; empty if it has none."""
    with contextlib.suppress(KeyError):
        return pwd.getpwuid(user).pw_name
    return ""


def _group(group: int) -> str:
    """The name of a group id; empty if it has none."""
    with contextlib.suppress(KeyError):
        return grp.getgrgid(group).gr_name
    return ""


def can_read(path: Path, user: int, group: int) -> bool:
    """Whether the mode of a path lets a user read the file, or list and enter the folder."""
    return allows_reading(path.stat(), user, group)


def can_write(path: Path, user: int, group: int) -> bool:
    """Whether the mode of a path lets a user write to the file, or create files in the folder."""
    status = path.stat()
    return allows(status, user, group, 3 if stat.S_ISDIR(status.st_mode) else 2)
