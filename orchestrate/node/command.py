"""A worker's command, for Python or any program, and the expansion of variables in it."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence

from orchestrate.node.ranks import CONTRACT, Env

NAMES = {*CONTRACT, "OMP_NUM_THREADS"} - {"WORKER_CORES", "WORKER_EXPAND", "WORKER_STDIN"}
PYTHON = re.compile(r"python(3(\.[0-9]+)?)?")
WITH_VALUE = ("-W", "-X")  # options of Python that take one
LAUNCHERS = {  # how a command begins that starts workers of its own, and the flag with which it joins other nodes
    ("torchrun",): "--node-rank",
    ("-m", "torch.distributed.run"): "--node-rank",
    ("-m", "torch.distributed.launch"): "--node-rank",
    ("accelerate", "launch"): "--machine_rank",
    ("-m", "accelerate.commands.launch"): "--machine_rank",
    ("-m", "accelerate.commands.accelerate_cli", "launch"): "--machine_rank",
    ("deepspeed",): "--node_rank",
    ("-m", "deepspeed.launcher.runner"): "--node_rank",
    ("fabric", "run"): "--node-rank",
    ("horovodrun",): "",
    ("mpiexec",): "",
    ("mpirun",): "",
}
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


def launcher(line: Sequence[str]) -> str:
    """Return the launcher of LAUNCHERS that the command line of a process runs, as in `named`; otherwise empty."""
    rest = [*line]
    if rest and PYTHON.fullmatch(os.path.basename(rest[0])):
        del rest[0]
        while rest and rest[0].startswith("-") and rest[0] not in ("-m", "-c"):
            del rest[: 2 if rest[0] in WITH_VALUE else 1]
    return named(begins(rest))


def begins(words: Sequence[str]) -> tuple[str, ...]:
    """Return how a command of LAUNCHERS begins that these words, without Python, run; empty if they run none."""
    first = (*(os.path.basename(word) for word in words[:1]), *words[1:])
    return next((start for start in LAUNCHERS if first[: len(start)] == start), ())


def named(start: tuple[str, ...]) -> str:
    """A launcher of LAUNCHERS, for display; empty for none."""
    return "python " * (start[:1] == ("-m",)) + " ".join(start)


def words(command: list[str]) -> list[str]:
    """The complete command line of a worker that is not forked."""
    return [sys.executable, "-u", *command] if of_python(command) else command
