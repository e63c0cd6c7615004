"""An argument parser whose errors are UsageErrors with a hint."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from typing import Any, NoReturn

from orchestrate.cli.args import Args
from orchestrate.console import quoted
from orchestrate.errors import UsageError, did_you_mean

JOB_FILES = (".yaml", ".yml", ".json")
EXPORTS = {
    "kubernetes": ("job", "jobset", "trainjob"),
    "slurm": ("venv", "apptainer", "pyxis"),
    "pbs": ("venv", "apptainer"),
    "compose": (),
}
# Options of sbatch that users try first.
OF_SBATCH = ("account", "constraint", "gres", "partition", "qos", "reservation", "time")
# Options and commands of other launchers and tools.
ELSEWHERE = {"-n": "--nodes", "-N": "--nodes", "-d": "--detach", "-np": "--nodes", "--nproc": "--nproc-per-node"}
COMMANDS_ELSEWHERE = {
    **{"list": "ps", "ls": "ps", "status": "ps", "jobs": "ps", "kill": "stop", "cancel": "stop", "restart": "resume"},
    **{"tail": "logs", "log": "logs", "show": "report", "compare": "report", "delete": "rm", "remove": "rm"},
    **{"clean": "prune", "version": "--version", "start": "run", "launch": "run", "train": "run", "submit": "run"},
}


class Parser(argparse.ArgumentParser):
    """ArgumentParser that raises UsageError with a hint instead of exiting."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def add_verbose(self) -> None:
        """Add --verbose to every command."""
        subcommands = [action for action in self._actions if isinstance(action, argparse._SubParsersAction)]
        for command in [parser for action in subcommands for parser in action.choices.values()]:
            command.add_verbose()
        if not subcommands:
            self.add_argument("-v", "--verbose", action="store_true", help="print a detailed log to stderr")

    def error(self, message: str) -> NoReturn:
        """Raise UsageError with a hint for `message`."""
        if match := re.search(r"^(?!argument --).*invalid choice: '(.*?)' \(choose from (.*)\)", message):
            known = re.findall(r"[\w-]+", match[2])
            kind = "target" if known == [*EXPORTS] else "command"
            script = kind == "command" and match[1].endswith((".py", ".sh"))
            hint = f"{self.prog} run {match[1]}" if script else did_you_mean(match[1], known, 2)
            if kind == "command" and match[1] in COMMANDS_ELSEWHERE:
                hint = f"did you mean {COMMANDS_ELSEWHERE[match[1]]}?"
            hint = hint or (f"one of {', '.join(known)}" if kind == "target" else f"{self.prog} --help")
            raise UsageError(f"unknown {kind} {quoted(match[1])}", hint)
        newest = f"{self.prog} latest, or a name: {self.prog.rpartition(' ')[0]} ps --all lists them"
        raise UsageError(message, newest if message.endswith("required: JOB") else f"{self.prog} --help")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse `args`; raises UsageError for unknown options and unexpected arguments."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            command = self.subparser(parsed.command)
            command = command.subparser(parsed.target) if parsed.command == "export" else command
            kind = "unknown option" if unknown[0].startswith("-") else "unexpected argument"
            raise UsageError(f"{parsed.command}: {kind} {quoted(unknown[0])}", _what_to_do(unknown, parsed, command))
        return parsed

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print the help or the version, unless stdout and stderr are closed, for which Python raises before 3.11.4."""
        if file or sys.stderr:
            super()._print_message(message, file)

    def flags(self) -> list[str]:
        """Return the names of all options."""
        return [name for action in self._actions for name in action.option_strings]

    def switches(self) -> set[str]:
        """Return the names of the options that take no value."""
        return {name for action in self._actions if action.nargs == 0 for name in action.option_strings}

    def subparser(self, command: str) -> Parser:
        """Return the parser of a command."""
        (subparsers,) = (action for action in self._actions if isinstance(action, argparse._SubParsersAction))
        parser: Parser = subparsers.choices[command]
        return parser


def _what_to_do(unknown: list[str], parsed: Args, command: Parser) -> str:
    """Return a hint for the first of the arguments that `command` does not know; others may be its value."""
    from orchestrate.spec.spec import FIELDS  # only here: it takes time to import

    flag, _, value = unknown[0].partition("=")
    key = flag.lstrip("-").replace("-", "_")
    if key in FIELDS and parsed.command == "resume":
        return "a job is resumed with the settings that it was started with; start a new one to change them"
    if parsed.command == "resume" and not did_you_mean(flag, command.flags()):
        return "a job is resumed with the arguments of its script; start a new one, with run, to change them"
    if key in FIELDS:
        return f"use --set {key}=VALUE"
    if key in OF_SBATCH:
        return f"use --set slurm.{key}=VALUE"
    if similar := did_you_mean(flag, command.flags()):
        return similar
    if flag in ELSEWHERE and parsed.script:
        return f"did you mean {ELSEWHERE[flag]}? Options of the script come after it: {parsed.script[0]} {flag}"
    if flag.startswith("-") and parsed.script:
        return f"options of the script come after it: {parsed.script[0]} {flag}"
    if flag.startswith("--") and str(getattr(parsed, "file", "")).endswith(JOB_FILES):
        value = value or (unknown[1] if len(unknown) > 1 else "true")
        return f"for an option of the script: --set hyperparameters.{flag[2:]}={shlex.quote(value)}"
    if parsed.command == "exec" and not flag.startswith("-"):
        return f"{command.prog} {parsed.job} -- {shlex.join(unknown)}"
    return f"{command.prog} --help"
