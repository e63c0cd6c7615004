"""The words of the command line: what each command takes, and where the job's own command begins."""

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

FLAGS = {  # keys of the job file that are flags, too
    "trainers": "N",
    "nproc_per_node": "N",
    "gpus": "all|none|N",
    "engine": "auto|docker|process|swarm",
    "image": "NAME",
    "name": "NAME",
    "memory": "4g",
    "cpus": "N",
    "max_run": "2h",
    "max_restarts": "N",
    "min_trainers": "N",
    "spares": "N",
}
RUNS = Path("runs")
RUN_COMMANDS = {
    "run": "run a job until it ends",
    "plan": "print the rank assignment without creating anything",
    "up": "start nodes that later jobs use",
}
JOB_COMMANDS = {
    "logs": "print the output of the workers",
    "attach": "follow a job until it ends; take over if its supervisor is gone",
    "wait": "wait until a job ends, and exit with its exit code",
    "stop": "stop a job and remove its nodes",
    "rm": "remove the files of a job that has ended, and everything else that is left of it",
}
READING = ("logs", "attach", "wait")  # commands that take the latest job where none is named
LATEST = "latest"
EXPORTS = {"kubernetes": ("job", "jobset", "trainjob"), "slurm": ("venv", "apptainer", "pyxis"), "compose": ()}
FILES = (".yaml", ".yml", ".json")  # how the name of a job file ends
COMMAND = "[[--] SCRIPT.py ARGS | -m MODULE ARGS | PROGRAM ARGS]"
EXITS = """\
exit codes:
  0    succeeded                   4    something is missing: image, GPUs, Compose
  1    a worker failed             5    lost: the engine no longer answers
  2    usage or job file           124  the time limit --max-run was reached
  3    no engine, or it refused    130  stopped by a user
"""


class Parser(argparse.ArgumentParser):
    """Errors in our own form: what, and what next."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def add_verbose(self) -> None:
        """Add --verbose to each command."""
        subcommands = [action for action in self._actions if isinstance(action, argparse._SubParsersAction)]
        for command in [one for action in subcommands for one in action.choices.values()]:
            command.add_verbose()
        if not subcommands:
            self.add_argument("-v", "--verbose", action="store_true", help="log to stderr what orchestrate does")

    def error(self, message: str) -> NoReturn:
        """Raise UsageError."""
        if wrong := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message):
            known = re.findall(r"[\w-]+", wrong[2])
            kind = "target" if known == [*EXPORTS] else "command"
            script = kind == "command" and wrong[1].endswith((".py", ".sh"))
            hint = f"{self.prog} run {wrong[1]}" if script else _near(wrong[1], known, self.prog)
            raise UsageError(f"unknown {kind} {shown(wrong[1])}", hint)
        raise UsageError(message, f"{self.prog} --help")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """The words as a namespace; raises UsageError for a word that the command does not know."""
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            one = self.of(found.command)
            one = one.of(found.target) if found.command == "export" else one
            flag = unknown[0].partition("=")[0]
            kind = "unknown option" if flag.startswith("-") else "unexpected argument"
            raise UsageError(f"{found.command}: {kind} {shown(unknown[0])}", _near(flag, one.flags(), one.prog))
        return found

    def flags(self) -> list[str]:
        """The names of its flags."""
        return [name for action in self._actions for name in action.option_strings]

    def switches(self) -> set[str]:
        """The names of its flags that take no value."""
        return {name for action in self._actions if action.nargs == 0 for name in action.option_strings}

    def of(self, command: str) -> Parser:
        """The parser of a command."""
        (kinds,) = (action for action in self._actions if isinstance(action, argparse._SubParsersAction))
        found: Parser = kinds.choices[command]
        return found


Kinds: TypeAlias = "argparse._SubParsersAction[Parser]"


def _near(word: str, known: list[str], prog: str) -> str:
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.65)
    few = f"one of {', '.join(known)}" if known == [*EXPORTS] else f"{prog} --help"
    return f"did you mean {near[0]}?" if near else few


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str] | None]:
    """The command line, and the words of the job's own command, if there are any. Raises UsageError.

    The job's command begins behind `--`, with `-m`, or with the first word that is neither a flag nor a job file.
    """
    if argv[:1] == ["help"]:
        argv = [*argv[1:], "--help"]
    parser = _parser()
    if argv and argv[0].startswith("-") and argv[0] not in (*parser.flags(), "--"):
        hint = f"options come after a command: {called()} run {argv[0]} …"
        raise UsageError(f"expected a command before {shown(argv[0])}", hint)
    own = len(argv) if "--" not in argv else argv.index("--")
    if argv[:1] and argv[0] in (*RUN_COMMANDS, "doctor", "export"):
        own = _own(argv, own, parser.of(argv[0]).switches())
    words, rest = argv[:own], argv[own:]
    args = parser.parse_args(words or ["--help"])
    return args, (rest[1:] if rest[:1] == ["--"] else rest) if own < len(argv) else None


def _own(argv: list[str], most: int, switches: set[str]) -> int:
    """How many words are ours, of which `switches` are flags without a value."""
    place = 2 if argv[0] == "export" else 1  # behind the command, and its target
    file = False
    while place < most:
        word = argv[place]
        if word == "-m":
            return place
        if word.startswith("-") and word != "-":
            valued = word not in switches and "=" not in word and not re.match("-e.", word)
            place += 1 + valued
        elif not file and word.endswith(FILES):
            file = True
            place += 1
        else:
            return place
    return most


def _parser() -> Parser:
    top = Parser(
        prog=called(),
        description="Run any PyTorch distributed program as a real multi-node job in containers.",
        usage="%(prog)s COMMAND [options]",
        epilog=f"get started:\n  {called()} run train.py --lr 0.1\n  {called()} run --help\n\n{EXITS}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=__version__)
    kinds = top.add_subparsers(
        dest="command", metavar="COMMAND", required=True, prog=top.prog, parser_class=Parser, title="commands"
    )
    _add_run_commands(kinds)
    _add_export(kinds, f"{top.prog} export")
    _add_job_commands(kinds)
    top.add_verbose()
    return top


def _add_run_commands(kinds: Kinds) -> None:
    for name, does in RUN_COMMANDS.items():
        command = kinds.add_parser(
            name,
            help=does,
            description=f"{does[0].upper()}{does[1:]}.",
            usage="%(prog)s [JOB.yaml] [options]" + f" {COMMAND}" * (name != "up"),
        )
        _add_job(command)
        if name == "run":
            command.add_argument("--dry-run", action="store_true", help="print the plan, create nothing")
            _add_instead(command)
            command.add_argument(
                "--detach", action="store_true", help="run in the background, and print the run directory"
            )
        _add_runs(command)
    command = kinds.add_parser(
        "doctor",
        help="report problems that keep jobs from running here",
        description="Report problems that keep jobs from running on this engine or on the hosts of its Swarm.",
    )
    _add_job(command)
    kinds.add_parser(
        "schema",
        help="print the JSON Schema of job files, for editors",
        description="Print the JSON Schema of job files. An editor completes and checks a file that begins with "
        "`# yaml-language-server: $schema=PATH`.",
    )


def _add_export(kinds: Kinds, prog: str) -> None:
    command = kinds.add_parser(
        "export",
        help="print the job as a file for Kubernetes, Slurm or Compose",
        description="Print the job as a file for Kubernetes, Slurm or Docker Compose.",
        usage=f"%(prog)s kubernetes|slurm|compose [JOB.yaml] [options] {COMMAND}",
    )
    targets = command.add_subparsers(
        dest="target", metavar="|".join(EXPORTS), required=True, prog=prog, parser_class=Parser
    )
    for target, forms in EXPORTS.items():
        command = targets.add_parser(
            target, help=", ".join(forms) or "a plain file", usage=f"%(prog)s [JOB.yaml] [options] {COMMAND}"
        )
        command.add_argument(
            "--form",
            metavar="FORM",
            help=f"{', '.join(forms)}; the first is the default" if forms else argparse.SUPPRESS,
        )
        _add_job(command)


def _add_job_commands(kinds: Kinds) -> None:
    command = kinds.add_parser(
        "down",
        help="remove the nodes that up started",
        description="Remove a cluster's nodes and files; those of its jobs stay.",
    )
    command.add_argument("cluster", type=_name, metavar="CLUSTER", help="name or unique prefix")
    command.add_argument("--dry-run", action="store_true", help="print what would be removed, and exit")
    _add_runs(command)
    _add_runs(kinds.add_parser("ps", help="list jobs and clusters", description="List the jobs and clusters."))
    for name, does in JOB_COMMANDS.items():
        command = kinds.add_parser(name, help=does, description=f"{does[0].upper()}{does[1:]}.")
        alone: dict[str, Any] = {"nargs": "?", "default": LATEST} if name in READING else {}
        said = "id, unique prefix, run directory, or latest" + " (default)" * bool(alone)
        command.add_argument("job", type=_job, metavar="JOB", help=said, **alone)
        _add_runs(command)
        if name == "attach":
            _add_instead(command)
        if name == "logs":
            command.add_argument("--rank", type=int, metavar="N", help="only the output of this rank, without prefix")
            command.add_argument("-f", "--follow", action="store_true", help="continue until the job ends")
        if name in ("stop", "rm"):
            command.add_argument("--dry-run", action="store_true", help="print what would be removed, and exit")


def _add_job(command: argparse.ArgumentParser) -> None:
    command.add_argument("file", nargs="?", type=Path, metavar="JOB.yaml", help="job file; options override it")
    command.add_argument("--nodes", metavar="N", help="nodes including the master; --nodes 4 equals --trainers 3")
    command.add_argument("--nnodes", dest="nodes", help=argparse.SUPPRESS)
    for name, value in FLAGS.items():
        flag = f"--{name.replace('_', '-')}"
        command.add_argument(flag, dest=name, metavar=value, help=description(name))
        if flag != f"--{name}":  # as torchrun spells it, too
            command.add_argument(f"--{name}", dest=name, help=argparse.SUPPRESS)
    command.add_argument(
        "-e",
        "--env",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="environment variable for every worker; without =VALUE, the value in this shell",
    )
    command.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any key of the job file")


def _add_instead(command: argparse.ArgumentParser) -> None:
    """Add what stdout may have at the end instead of the workers' output, which then goes to stderr."""
    instead = command.add_mutually_exclusive_group()
    instead.add_argument("--print-path", action="store_true", help="print only the run directory to stdout")
    instead.add_argument("--json", action="store_true", help="print only the report to stdout, as JSON")


def _add_runs(command: argparse.ArgumentParser) -> None:
    command.add_argument("--runs", type=_folder, metavar="DIR", help=f"folder of the run directories (default {RUNS})")


def _name(text: str) -> str:
    """The name of a job or cluster, or how it begins: as `store.new_id` makes names, so that none is a path."""
    if not re.fullmatch("[a-z0-9-]{1,63}", text):
        raise argparse.ArgumentTypeError(f"{shown(text)} is not a name of lower-case letters, digits and hyphens")
    return text


def _job(text: str) -> str:
    """A job by its name, or by its folder, as `run` prints it."""
    if "/" not in text:
        return _name(text)
    path = Path(text)
    return f"{path.parent}/{_name(path.name)}"


def _folder(text: str) -> Path:
    """The folder of `--runs`, which may not exist yet."""
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
    """The layer of a job file that the flags of a command line stand for."""
    found = {name: value for name in ("nodes", *FLAGS) if (value := getattr(args, name)) is not None}
    return found | dict(map(_variable, args.env))


def _variable(text: str) -> tuple[str, str]:
    """The key of a job file, and its value, that `NAME=VALUE` stands for, or `NAME` for a variable of this shell."""
    name, equals, value = text.partition("=")
    if not equals and name not in os.environ:
        raise UsageError(f"--env {shown(name)} is not set in this shell", "write --env NAME=VALUE")
    return f"env.{name}", value if equals else os.environ[name]
