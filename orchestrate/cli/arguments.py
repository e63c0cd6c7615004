"""Command-line arguments: where the job's own command starts, and options as keys of a job file."""

from __future__ import annotations

import os
import re
from typing import Any

from orchestrate.cli.args import Args
from orchestrate.cli.options import FLAGS, SWITCHES, parser
from orchestrate.cli.parser import JOB_FILES
from orchestrate.cli.table import COMMANDS, Command
from orchestrate.console import called, quoted
from orchestrate.errors import UsageError


def parse(argv: list[str]) -> Args:
    """Parse the command line; `script` is the job's own command, None if there is none. Raises UsageError.

    `separated` is whether it comes after `--`.

    The job's command starts after `--`, at `-m`, or at the first word that is neither an option nor a job file.
    """
    top = parser(argv[0] if argv else "")
    about = COMMANDS.get(argv[0] if argv else "", Command(""))
    if argv and argv[0].startswith("-") and argv[0] not in (*top.flags(), "--"):
        hint = f"options come after the command: {called()} run {argv[0]} …"
        raise UsageError(f"expected a command before {quoted(argv[0])}", hint)
    split = len(argv) if "--" not in argv else argv.index("--")
    if about.plans or about.script:
        split = _command_start(argv, split, top.subparser(argv[0]).switches())
    words, rest = argv[:split], argv[split:]
    script = (rest[1:] if rest[0] == "--" else rest) if rest else None
    found = Args()
    found.script, found.separated = script, rest[:1] == ["--"]
    top.parse_args(words or ["--help"], found)
    for name in [name for name, value in vars(found).items() if value is None and hasattr(Args, name)]:
        delattr(found, name)  # it has a default
    return found


def _command_start(argv: list[str], end: int, switches: set[str]) -> int:
    """Return the index of the job's own command, at most `end`; `switches` are options without a value."""
    index = 2 if argv[0] == "export" else 1  # after the command and the target of an export
    seen_file = False
    while index < end:
        word = argv[index]
        if word == "-m":
            return index
        if word.startswith("-") and word != "-":
            takes_value = word not in switches and "=" not in word and not re.match("-e.", word)
            index += 1 + takes_value
        elif not seen_file and word.endswith(JOB_FILES):
            seen_file = True
            index += 1
        else:
            return index
    return end


def flags(args: Args) -> dict[str, Any]:
    """Return the options of the command line as keys of a job file."""
    keys = {
        name: value
        for name in ("nodes", "pip", "mounts", *FLAGS, *SWITCHES)
        if (value := vars(args).get(name)) is not None
    }
    return keys | dict([*map(_variable, args.env), *map(_data, args.data), *map(_secret, args.secret)])


def _data(text: str) -> tuple[str, str]:
    """Return the job file key and value for `NAME=DIR`."""
    name, equals, folder = text.partition("=")
    if not equals or not folder:
        raise UsageError(f"--data {quoted(text)}: missing =", "use --data NAME=DIR")
    return f"data.{name}", folder


def _secret(text: str) -> tuple[str, str]:
    """Return the job file key and value for `NAME=FILE`, or for `NAME`, a variable of this shell."""
    from orchestrate.spec.inputs import OF_SHELL  # only here: it takes time to import

    name, _, path = text.partition("=")
    return f"secrets.{name}", path or OF_SHELL


def _variable(text: str) -> tuple[str, str]:
    """Return the job file key and value for `NAME=VALUE`, or for `NAME` with its value in this shell."""
    name, equals, value = text.partition("=")
    if not equals and name not in os.environ:
        raise UsageError(
            f"environment variable {quoted(name)} is not set in this shell", f"export {name}, or use --env NAME=VALUE"
        )
    return f"env.{name}", value if equals else os.environ[name]
