"""Check that no other account has created, or can replace, a run directory or a folder above it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import grp
import os
import pwd
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

from orchestrate.errors import UsageError
from orchestrate.files.folder import visited
from orchestrate.host import private, users, writable

ACL_USER, ACL_GROUP, ACL_WRITE = 2, 8, 2  # tags and a permission in Linux access control lists


def foreign(run: Path) -> str:
    """Why a run directory cannot be this account's; empty if it can be, or if it does not exist."""
    try:
        status = run.lstat()
    except FileNotFoundError:
        return ""
    except PermissionError:
        return "you cannot enter the folder that it is in"
    if not stat.S_ISDIR(status.st_mode):
        return "it is a link" if stat.S_ISLNK(status.st_mode) else "it is not a folder"
    if status.st_uid != os.geteuid():
        return f"it belongs to {person(status.st_uid)}"
    return "other users can write to it" if status.st_mode & 0o022 else ""


def check(runs: Path, what: str = "jobs", hint: str = "") -> Path:
    """Resolve the folder of run directories; raises UsageError if the caller is root and another account can change it.

    An account that can change a folder in the path, or owns a link there, could redirect root while a job runs, and
    root would write and remove files there. Other callers are not refused: they can lose only their own files.
    Raises OSError for a loop of links.
    """
    if os.geteuid():
        try:
            return runs.resolve()
        except RuntimeError:  # Python raises this until 3.12
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(runs)) from None
    trusted = {0, (users.sudo() or (0, 0))[0]}
    for here in visited(runs):  # entries of a safe folder cannot be replaced
        try:
            status = here.lstat()
        except FileNotFoundError:
            continue
        if (who := _changer(here, status, trusted)) and not users.alone():
            other = "use --runs to name a folder that only root can change, such as --runs /root/runs"
            raise UsageError(f"root cannot keep {what} in {Path.cwd() / runs}: {who} can change {here}", hint or other)
    return here


def cache(kind: str) -> Path:
    """Return the folder of a kind of cached files, which may not exist yet: they are executed, for example.

    Raises UsageError if another account, or a job of this one, could have changed it.
    """
    path = private.cache(kind)
    writable.resolved(str(path / "files"), fixed=True)  # what is in it
    for folder in (path.parent, path):
        if why := foreign(folder):
            raise UsageError(f"{folder} cannot be used as a cache: {why}", "set XDG_CACHE_HOME to a folder of yours")
    check(path, "a cache", "set XDG_CACHE_HOME to a folder that only root can change")
    return path


@contextlib.contextmanager
def filling(kind: str, lock: Path) -> Iterator[None]:
    """Lock a cached folder of a kind while it is filled; waits for another run, or `prune`, that has locked it.

    `lock` is its lock file, whose folder is created. Raises UsageError as `cache` does, and OSError.
    """
    cache(kind)
    while True:
        private.make(lock.parent)
        with lock.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if os.fstat(file.fileno()).st_nlink:  # else it was removed together with the cached folder
                yield
                return


def make(runs: Path) -> None:
    """Create the folder of run directories, and check it again: in /tmp, another user may have created it first.

    Raises UsageError as `check` does, and OSError.
    """
    runs.mkdir(parents=True, exist_ok=True)
    check(runs)


def _changer(folder: Path, status: os.stat_result, trusted: set[int]) -> str:
    """An account, other than trusted users, that can replace a link or the entries of a folder; empty if none can."""
    acts = users.account(status.st_uid) or status.st_uid in users.FREE  # nodes act as FREE; other ids cannot
    if acts and status.st_uid not in trusted:
        return person(status.st_uid)
    if stat.S_ISLNK(status.st_mode) or status.st_mode & stat.S_ISVTX:  # as in /tmp: only its owner replaces a file
        return ""
    if status.st_mode & stat.S_IWOTH:
        return "every user"
    if not status.st_mode & stat.S_IWGRP:  # the group bits, or the mask of an access control list
        return ""
    listed = _listed(folder)
    writers = {who for tag, who in listed if tag == ACL_USER}
    for group in (status.st_gid, *(who for tag, who in listed if tag == ACL_GROUP)):
        writers |= _members(group)
    return next(map(person, sorted(writers - trusted)), "")


def _listed(folder: Path) -> list[tuple[int, int]]:
    """The users and groups, with their tags, that an access control list allows to write; see acl(5)."""
    if not hasattr(os, "getxattr"):
        return []
    try:
        value = os.getxattr(folder, "system.posix_acl_access", follow_symlinks=False)
    except OSError:  # no such list
        return []
    return [(tag, who) for tag, rights, who in struct.iter_unpack("<HHI", value[4:]) if rights & ACL_WRITE]


def _members(group: int) -> set[int]:
    """The users of a group: those with it as primary group, and its members."""
    found = {entry.pw_uid for entry in pwd.getpwall() if entry.pw_gid == group}
    with contextlib.suppress(KeyError):
        for name in grp.getgrgid(group).gr_mem:
            with contextlib.suppress(KeyError):
                found.add(pwd.getpwnam(name).pw_uid)
    return found


def as_owner(path: Path, command: str) -> str:
    """Return how root runs one of our commands as the account that a path belongs to; empty for others than root."""
    user = 0 if os.geteuid() or not path.exists() else path.lstat().st_uid
    name = users.account(user) if user else ""
    return f"run it as that user: runuser -u {name} -- python -m orchestrate {command.rstrip()}" if name else ""


def person(user: int) -> str:
    """A user id with the name of its account, if it has one."""
    return f"{name} (user {user})" if (name := users.account(user)) else f"user {user}"
