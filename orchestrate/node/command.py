"""A worker's command, for Python or any program, and the expansion of variables in it."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

from orchestrate.node.ranks import CONTRACT, Env

NAMES = {*CONTRACT, "OMP_NUM_THREADS"} - {"WORKER_CORES", "WORKER_EXPAND", "WORKER_STDIN"}
VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})", re.ASCII)


def expanded(command: list[str], env: Env) -> list[str]:
    """Expand `$NAME` and `${NAME}` to the worker's own values, for variables that the orchestrator sets or `DATA_…`.

    Everything else remains unchanged, including any other `$`; with `WORKER_EXPAND=false`, the whole command does.
    """
    if env.get("WORKER_EXPAND") == "false":
        return command

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        return env.get(name, match[0]) if name in NAMES or name.startswith("DATA_") else match[0]

    return [VARIABLE.sub(value, word) for word in command]


def of_python(command: Sequence[str]) -> bool:
    """Whether a command is for Python: `SCRIPT.py ARGS` or `-m MODULE ARGS`; any other command names a program."""
    return bool(command) and (command[0].startswith("-") or command[0].endswith(".py"))


def words(command: list[str]) -> list[str]:
    """The complete command line of a worker that is not forked."""
    return [sys.executable, "-u", *command] if of_python(command) else command
