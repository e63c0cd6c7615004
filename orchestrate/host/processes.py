"""Processes of this machine, by their id and the time at which they started: an id may be used again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def started(pid: int) -> str:
    """Return the start time of a process of this user, in the system's format; empty if gone or another user's."""
    try:
        if sys.platform == "linux":
            path = Path(f"/proc/{pid}")
            if path.stat().st_uid != os.geteuid():
                return ""
            return path.joinpath("stat").read_text().rpartition(")")[2].split()[19]  # field 22 of proc(5)
        found = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid), "-U", str(os.geteuid())], capture_output=True)
        return found.stdout.decode().strip()
    except (OSError, IndexError):
        return ""


def myself() -> str:
    """Return a text that names this process, for `named`: its id and its start time."""
    return f"{os.getpid()} {started(os.getpid())}"


def named(text: str) -> int:
    """Return the id of the process of this user that a text of `myself` names; 0 if it has ended."""
    number, _, since = text.partition(" ")
    pid = int(number) if number.isascii() and number.isdigit() and len(number) < 20 else 0
    return pid if pid > 1 and since and started(pid) == since else 0
