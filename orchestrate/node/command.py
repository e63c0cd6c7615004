"""A worker's command: Python's arguments or those of any program, and what is in them of the worker's environment."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

from orchestrate.node.ranks import CONTRACT, Env

NAMES = {*CONTRACT, "OMP_NUM_THREADS"} - {"WORKER_CORES", "WORKER_EXPAND"}
VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})", re.ASCII)


def expanded(command: list[str], env: Env) -> list[str]:
    """The command with the worker's own values for `$NAME` and `${NAME}`, where the orchestrator sets that variable.

    Every other byte remains as it is, also a `$`, and all of them do if `WORKER_EXPAND` is `false`.
    """
    if env.get("WORKER_EXPAND") == "false":
        return command

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        return env.get(name, match[0]) if name in NAMES else match[0]

    return [VARIABLE.sub(value, word) for word in command]


def of_python(command: Sequence[str]) -> bool:
    """Whether a command is for Python: `SCRIPT.py ARGS` or `-m MODULE ARGS`; any other one names a program."""
    return bool(command) and (command[0].startswith("-") or command[0].endswith(".py"))


def words(command: list[str]) -> list[str]:
    """The whole command line of a worker that is not forked."""
    return [sys.executable, "-u", *command] if of_python(command) else command
