"""Command-line arguments: the options of each command, and where the job's own command starts."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import stat
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from orchestrate import __version__
from orchestrate.console import called
from orchestrate.errors import UsageError
from orchestrate.job.spec import description
from orchestrate.job.strict_yaml import shown

FLAGS = {  # job file keys that are also options, with their metavars
    "trainers": "N",
    "nproc_per_node": "N",
    "gpus": "auto|all|none|N",
    "engine": "auto|docker|process|swarm",
    "image": "NAME",
    "name": "NAME",
    "memory": "SIZE",
    "cpus": "N",
    "max_run": "DURATION",
    "max_restarts": "N",
    "min_trainers": "N",
    "spares": "N",
}
SWITCHES = ("require_communication",)  # keys that are options without a value
RUNS = Path("runs")
RUN_COMMANDS = {
    "run": "run a job until it ends",
    "plan": "print the rank assignment without creating anything",
    "up": "start a cluster: nodes that stay up for later jobs",
}
JOB_COMMANDS = {
    "logs": "print the output of a job's workers",
    "attach": "follow a job until it ends; take over if it has no supervisor",
    "wait": "wait until a job ends, and exit with its exit code",
    "stop": "stop a job and remove its nodes",
    "rm": "remove a job that has ended, with its files and any leftover nodes",
}
LATEST_BY_DEFAULT = ("logs", "attach", "wait")  # commands whose JOB is optional
LATEST = "latest"
EXPORTS = {"kubernetes": ("job", "jobset", "trainjob"), "slurm": ("venv", "apptainer", "pyxis"), "compose": ()}
JOB_FILE_SUFFIXES = (".yaml", ".yml", ".json")
COMMAND = "[[--] SCRIPT.py ARGS | -m MODULE ARGS | PROGRAM ARGS]"
EXITS = """\
exit codes:
  0    succeeded                   4    something is missing: image, GPUs, Compose
  1    a worker failed             5    lost: the engine stopped responding
  2    bad usage or job file       124  the time limit --max-run was reached
  3    no engine, or it failed     130  stopped by the user
"""


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
        if match := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message):
            known = re.findall(r"[\w-]+", match[2])
            kind = "target" if known == [*EXPORTS] else "command"
            script = kind == "command" and match[1].endswith((".py", ".sh"))
            hint = f"{self.prog} run {match[1]}" if script else _suggestion(match[1], known, self.prog)
            raise UsageError(f"unknown {kind} {shown(match[1])}", hint)
        raise UsageError(message, f"{self.prog} --help")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse `args`; raises UsageError for unknown options and unexpected arguments."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            command = self.subparser(parsed.command)
            command = command.subparser(parsed.target) if parsed.command == "export" else command
            flag = unknown[0].partition("=")[0]
            kind = "unknown option" if flag.startswith("-") else "unexpected argument"
            hint = _suggestion(flag, command.flags(), command.prog)
            raise UsageError(f"{parsed.command}: {kind} {shown(unknown[0])}", hint)
        return parsed

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


Subparsers: TypeAlias = "argparse._SubParsersAction[Parser]"


def _suggestion(word: str, known: list[str], prog: str) -> str:
    matches = difflib.get_close_matches(word, known, n=1, cutoff=0.65)
    fallback = f"one of {', '.join(known)}" if known == [*EXPORTS] else f"{prog} --help"
    return f"did you mean {matches[0]}?" if matches else fallback


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str] | None]:
    """Parse the command line into our arguments and the job's own command, None if there is none. Raises UsageError.

    The job's command starts after `--`, at `-m`, or at the first word that is neither an option nor a job file.
    """
    if argv[:1] == ["help"]:
        argv = [*argv[1:], "--help"]
    parser = _parser()
    if argv and argv[0].startswith("-") and argv[0] not in (*parser.flags(), "--"):
        hint = f"options come after the command: {called()} run {argv[0]} …"
        raise UsageError(f"expected a command before {shown(argv[0])}", hint)
    split = len(argv) if "--" not in argv else argv.index("--")
    if argv[:1] and argv[0] in (*RUN_COMMANDS, "doctor", "export"):
        split = _command_start(argv, split, parser.subparser(argv[0]).switches())
    words, rest = argv[:split], argv[split:]
    args = parser.parse_args(words or ["--help"])
    return args, (rest[1:] if rest[:1] == ["--"] else rest) if split < len(argv) else None


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
        elif not seen_file and word.endswith(JOB_FILE_SUFFIXES):
            seen_file = True
            index += 1
        else:
            return index
    return end


def _parser() -> Parser:
    top = Parser(
        prog=called(),
        description="Run any PyTorch distributed program as a real multi-node job in containers.",
        usage="%(prog)s COMMAND [options]",
        epilog=f"get started:\n  {called()} run train.py --lr 0.1\n  {called()} run --help\n\n{EXITS}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=__version__)
    subparsers = top.add_subparsers(
        dest="command", metavar="COMMAND", required=True, prog=top.prog, parser_class=Parser, title="commands"
    )
    _add_run_commands(subparsers)
    _add_export(subparsers, f"{top.prog} export")
    _add_job_commands(subparsers)
    top.add_verbose()
    return top


def _add_run_commands(subparsers: Subparsers) -> None:
    for name, summary in RUN_COMMANDS.items():
        command = subparsers.add_parser(
            name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.",
            usage="%(prog)s [JOB.yaml] [options]" + f" {COMMAND}" * (name != "up"),
        )
        _add_job(command)
        if name == "run":
            command.add_argument("--dry-run", action="store_true", help="print the plan without creating anything")
            _add_stdout_options(command)
            command.add_argument(
                "--detach", action="store_true", help="run in the background, and print the run directory"
            )
        _add_runs(command)
    command = subparsers.add_parser(
        "doctor",
        help="report problems that keep jobs from running",
        description="Report problems that keep jobs from running on this engine or on the hosts of its Swarm.",
        usage=f"%(prog)s [JOB.yaml] [options] {COMMAND}",
    )
    _add_job(command)
    subparsers.add_parser(
        "schema",
        help="print the JSON Schema of job files, for editors",
        description="Print the JSON Schema of job files. Editors use it to complete and validate files that start with "
        "`# yaml-language-server: $schema=PATH`.",
    )


def _add_export(subparsers: Subparsers, prog: str) -> None:
    command = subparsers.add_parser(
        "export",
        help="print the job as a file for Kubernetes, Slurm or Compose",
        description="Print the job as a file for Kubernetes, Slurm or Docker Compose.",
        usage=f"%(prog)s kubernetes|slurm|compose [JOB.yaml] [options] {COMMAND}",
    )
    targets = command.add_subparsers(
        dest="target", metavar="|".join(EXPORTS), required=True, prog=prog, parser_class=Parser
    )
    for (target, forms), name in zip(EXPORTS.items(), ("Kubernetes", "Slurm", "Docker Compose")):
        command = targets.add_parser(
            target,
            help=f"--form {'|'.join(forms)}" if forms else "a Compose file",
            description=f"Print the job as a file for {name}.",
            usage=f"%(prog)s [JOB.yaml] [options] {COMMAND}",
        )
        command.add_argument(
            "--form",
            metavar="FORM",
            help=f"kind of output: {', '.join(forms)} (default: {forms[0]})" if forms else argparse.SUPPRESS,
        )
        _add_job(command)


def _add_job_commands(subparsers: Subparsers) -> None:
    command = subparsers.add_parser(
        "down",
        help="remove a cluster that was started by up",
        description="Remove a cluster's nodes and files, but not the files of its jobs.",
    )
    command.add_argument("cluster", type=_name, metavar="CLUSTER", help="name or unique prefix")
    command.add_argument("--dry-run", action="store_true", help="print what would be removed, and exit")
    _add_runs(command)
    _add_runs(
        subparsers.add_parser(
            "ps", help="list running jobs and clusters", description="List running jobs and clusters."
        )
    )
    for name, summary in JOB_COMMANDS.items():
        command = subparsers.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        optional: dict[str, Any] = {"nargs": "?", "default": LATEST} if name in LATEST_BY_DEFAULT else {}
        job_help = "id, unique prefix, run directory, or latest" + " (default)" * bool(optional)
        command.add_argument("job", type=_job, metavar="JOB", help=job_help, **optional)
        _add_runs(command)
        if name == "attach":
            _add_stdout_options(command)
        if name == "logs":
            command.add_argument(
                "--rank", type=int, metavar="N", help="print only the output of this rank, without prefixes"
            )
            command.add_argument("-f", "--follow", action="store_true", help="follow the output until the job ends")
        if name in ("stop", "rm"):
            command.add_argument("--dry-run", action="store_true", help="print what would be removed, and exit")


def _add_job(command: argparse.ArgumentParser) -> None:
    command.add_argument("file", nargs="?", type=Path, metavar="JOB.yaml", help="job file; options override it")
    command.add_argument(
        "--nodes", metavar="N", help="number of nodes including the master; --nodes 4 is equivalent to --trainers 3"
    )
    command.add_argument("--nnodes", dest="nodes", help=argparse.SUPPRESS)
    for name, value in FLAGS.items():
        flag = f"--{name.replace('_', '-')}"
        command.add_argument(flag, dest=name, metavar=value, help=description(name))
        if flag != f"--{name}":  # torchrun also accepts underscores
            command.add_argument(f"--{name}", dest=name, help=argparse.SUPPRESS)
    for name in SWITCHES:
        flag = f"--{name.replace('_', '-')}"
        command.add_argument(flag, dest=name, action="store_const", const="true", help=description(name))
    command.add_argument(
        "-e",
        "--env",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="set an environment variable for every worker; without =VALUE, use its value in this shell",
    )
    command.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="set a key of the job file, such as shm_size=4g"
    )


def _add_stdout_options(command: argparse.ArgumentParser) -> None:
    """Add the options that replace worker output on stdout; worker output then goes to stderr."""
    group = command.add_mutually_exclusive_group()
    group.add_argument("--print-path", action="store_true", help="print only the run directory to stdout")
    group.add_argument("--json", action="store_true", help="print only the report to stdout, as JSON")


def _add_runs(command: argparse.ArgumentParser) -> None:
    command.add_argument("--runs", type=_folder, metavar="DIR", help=f"folder for run directories (default: {RUNS})")


def _name(text: str) -> str:
    """Check the name of a job or cluster, or its prefix: the characters of `store.new_id`, so that none is a path."""
    if not re.fullmatch("[a-z0-9-]{1,63}", text):
        raise argparse.ArgumentTypeError(f"invalid name {shown(text)}: use lowercase letters, digits and hyphens")
    return text


def _job(text: str) -> str:
    """Check a job's name, or its run directory as `run` prints it."""
    if "/" not in text:
        return _name(text)
    path = Path(text)
    return f"{path.parent}/{_name(path.name)}"


def _folder(text: str) -> Path:
    """Check the folder of `--runs`, which may not exist yet."""
    try:
        if not text or not stat.S_ISDIR(os.stat(text).st_mode):
            raise argparse.ArgumentTypeError(f"{shown(text)} is not a folder")
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise argparse.ArgumentTypeError(f"{shown(text)} cannot be used: {why}") from None
    return Path(text)


def flags(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options of the command line as keys of a job file."""
    keys = {name: value for name in ("nodes", *FLAGS, *SWITCHES) if (value := getattr(args, name)) is not None}
    return keys | dict(map(_variable, args.env))


def _variable(text: str) -> tuple[str, str]:
    """Return the job file key and value for `NAME=VALUE`, or for `NAME` with its value in this shell."""
    name, equals, value = text.partition("=")
    if not equals and name not in os.environ:
        raise UsageError(f"environment variable {shown(name)} is not set in this shell", "use --env NAME=VALUE")
    return f"env.{name}", value if equals else os.environ[name]
