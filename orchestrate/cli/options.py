"""The parser of the command line, and options that several commands have."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import stat
from pathlib import Path
from typing import Any

from orchestrate import __version__
from orchestrate.cli.args import Args
from orchestrate.cli.parser import Parser
from orchestrate.cli.table import COMMANDS, USUAL
from orchestrate.console import called, quoted

FLAGS = {  # job file keys that are also options, with their metavars
    "trainers": "N",
    "nproc_per_node": "N",
    "gpus": "auto|all|none|N",
    "engine": "auto|docker|process|swarm|slurm",
    "image": "NAME",
    "dockerfile": "DIR",
    "requirements": "FILE",
    "source": "DIR|git+URL",
    "chdir": "DIR",
    "checkpoints": "URL",
    "output": "URL",
    "name": "NAME",
    "memory": "SIZE",
    "cpus": "N",
    "max_run": "DURATION",
    "on_event": "URL|COMMAND",
    "max_restarts": "N",
    "min_trainers": "N",
    "spares": "N",
    "keep": "DURATION",
}
SWITCHES = ("require_communication", "isolated", "stdin", "queue")  # keys that are options without a value
GROUPS = {  # of options of a job, in the help
    "nodes": ("nodes", "trainers", "nproc_per_node", "gpus", "engine", "image", "dockerfile", "memory", "cpus", "keep"),
    "code and packages": ("source", "chdir", "requirements", "pip", "env", "stdin", "name", "set"),
    "data and results": ("data", "mount", "secret", "checkpoints", "output"),
    "limits and failures": ("max_run", "max_restarts", "min_trainers", "spares", "require_communication", "on_event"),
}
RUNS = Path("runs")
LATEST = "latest"
COMMAND = "[[--] SCRIPT.py ARGS | -m MODULE ARGS | PROGRAM ARGS]"
EXITS = """\
exit codes:
  0    succeeded                   4    something missing: image, GPUs, Compose
  1    a worker failed             5    lost: the outcome is unknown
  2    bad usage or job file       124  the time limit --max-run was reached
  3    no engine, no object store  130  stopped by the user
"""


def parser(command: str) -> Parser:
    """Return the parser of the command line, without the job's own command; of the commands, `command` is complete."""
    top = Parser(
        prog=called(),
        description="Run any PyTorch distributed program as a real multi-node job in containers.",
        usage="%(prog)s COMMAND [options]",
        epilog=f"{_commands()}{EXITS}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
    )
    top.add_argument("-h", "--help", action="help", help=argparse.SUPPRESS)  # with it, the help would not fit
    top.add_argument("--version", action="version", version=__version__, help=argparse.SUPPRESS)
    subparsers = top.add_subparsers(
        dest="command", metavar="COMMAND", required=True, prog=top.prog, parser_class=Parser, help=argparse.SUPPRESS
    )
    for name, about in COMMANDS.items():
        added = subparsers.add_parser(name, description=f"{about.summary[0].upper()}{about.summary[1:]}.")
        if about.plans or about.script:
            added.usage = "%(prog)s [JOB.yaml] [options]" + f"\n         {COMMAND}" * about.script
        if about.inside:
            added.usage = "%(prog)s [JOB] [options] -- COMMAND"
        if name == command:
            module(name).add_arguments(added)
    top.add_verbose()
    return top


def _commands() -> str:
    """List the usual commands with what they do, and the names of all, in groups."""
    groups: dict[str, list[str]] = {}
    for name, about in COMMANDS.items():
        groups.setdefault(about.group, []).append(name)
    usual = "".join(f"  {name:<8}  {COMMANDS[name].summary}\n" for name in USUAL)
    every = "".join(f"  {title + ':':<14}{' '.join(names)}\n" for title, names in groups.items())
    return f"most used:\n{usual}\nall commands ({called()} help COMMAND):\n{every}\n"


def module(command: str) -> Any:
    """Import the module of a command."""
    return importlib.import_module(f"orchestrate.cli.commands.{command}")


def add_job_name(command: argparse.ArgumentParser, latest: bool, needed: bool = True) -> None:
    """Add the job that a command is about; `latest` is whether it is the latest job by default."""
    optional: dict[str, Any] = {"nargs": "?", "default": LATEST} if latest else {} if needed else {"nargs": "?"}
    text = "id, unique prefix, run directory, or latest, the one created last" + " (default)" * latest
    command.add_argument("job", type=job, metavar="JOB", help=text, **optional)


def add_follow(command: argparse.ArgumentParser) -> None:
    """Add the option of commands that can follow a job."""
    command.add_argument("-f", "--follow", action="store_true", help="follow the job until it ends")


def add_job_options(command: argparse.ArgumentParser) -> None:
    """Add the job file, and the options that are keys of it."""
    from orchestrate.spec.spec import description  # only here, as below: --help needs nothing of jobs

    command.add_argument("file", nargs="?", type=Path, metavar="JOB.yaml", help="job file; options override it")
    titled = {title: command.add_argument_group(title) for title in GROUPS}
    groups = {key: titled[title] for title, keys in GROUPS.items() for key in keys}
    groups["nodes"].add_argument("--nodes", metavar="N", help="number of nodes, with the master (default: 4)")
    command.add_argument("--nnodes", dest="nodes", help=argparse.SUPPRESS)
    for name, value in FLAGS.items():
        flag = f"--{name.replace('_', '-')}"
        groups[name].add_argument(flag, dest=name, metavar=value, help=description(name))
        if flag != f"--{name}":  # torchrun also accepts underscores
            command.add_argument(f"--{name}", dest=name, help=argparse.SUPPRESS)
    for name in SWITCHES:
        flag = f"--{name.replace('_', '-')}"
        group = groups.get(name, titled["nodes"])
        group.add_argument(flag, dest=name, action="store_const", const="true", help=description(name))
    groups["env"].add_argument(
        "-e",
        "--env",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="set an environment variable for every worker; without =VALUE, use its value in this shell",
    )
    groups["data"].add_argument(
        "--data",
        action="append",
        default=[],
        metavar="NAME=DIR",
        help="make a folder available to workers, at the path in $DATA_NAME; may be repeated",
    )
    groups["secret"].add_argument(
        "--secret",
        action="append",
        default=[],
        metavar="NAME[=FILE]",
        help="make a secret available as a file, at the path in $NAME_FILE: the content of FILE, or the value of the "
        "variable NAME of this shell; may be repeated",
    )
    groups["mount"].add_argument(
        "--mount",
        action="append",
        dest="mounts",
        metavar="DIR:PATH[:rw]",
        help="mount a folder of this machine in nodes, read-only unless :rw; may be repeated",
    )
    groups["pip"].add_argument(
        "--pip",
        action="append",
        metavar="PACKAGE",
        help="install a Python package, such as lightning or 'transformers>=4'; may be repeated",
    )
    groups["set"].add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="set a key of the job file, such as shm_size=4g"
    )


def add_detach(parser: Parser) -> None:
    """Add the option of commands that start a job."""
    parser.add_argument("--detach", action="store_true", help="run in the background, and print the run directory")


def add_stdout_options(command: argparse.ArgumentParser) -> None:
    """Add the options that replace worker output on stdout; worker output then goes to stderr."""
    group = command.add_mutually_exclusive_group()
    group.add_argument("--print-path", action="store_true", help="print only the run directory to stdout")
    group.add_argument("--json", action="store_true", help="print only the report to stdout, as JSON")
    command.add_argument(
        "--progress",
        choices=("auto", "tty", "plain", "json", "quiet"),
        default="auto",
        help="how to show a running job: a live view on a terminal (tty), lines (plain), lines of JSON (json), or only "
        "warnings and the result (quiet); default: auto",
    )
    command.add_argument("-q", "--quiet", action="store_true", help="print only warnings and the result")
    command.add_argument("--junit-xml", type=Path, metavar="FILE", help="write the result as JUnit XML, for CI")
    add_ranks(command)


def quiet(args: Args) -> bool:
    """Whether only warnings and the result are printed."""
    return bool(args.quiet) or args.progress == "quiet"


def add_dry_run(command: argparse.ArgumentParser) -> None:
    """Add the option of commands that remove something."""
    command.add_argument("--dry-run", action="store_true", help="print what would be removed, and exit")


def add_ranks(command: argparse.ArgumentParser) -> None:
    """Add the options that select and mark lines of workers."""
    command.add_argument("--ranks", metavar="N,N-N", help="print only the output of these ranks")
    command.add_argument("-t", "--timestamps", action="store_true", help="print the time of each line")


def add_runs(command: argparse.ArgumentParser) -> None:
    """Add the folder for run directories."""
    command.add_argument("--runs", type=folder, metavar="DIR", help=f"folder for run directories (default: {RUNS})")


def name(text: str) -> str:
    """Check the name of a job or cluster, or its prefix: the characters of new ones, so that none is a path.

    A name as it was given to `--name`, such as `lr-0.01`, becomes that of the job: `lr-0-01`.
    """
    if re.fullmatch("[a-z0-9-]{1,63}", text):
        return text
    if not re.fullmatch(r"[A-Za-z0-9][\w. -]{,62}", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"invalid name {quoted(text)}: use lowercase letters, digits and hyphens")
    from orchestrate.files.paths import as_name  # only here: --help does not need it

    return as_name(text)


def job(text: str) -> str:
    """Check a job's name, or its run directory as `run` prints it."""
    if "/" not in text:
        return name(text)
    path = Path(text)
    return f"{path.parent}/{name(path.name)}"


def count(text: str) -> int:
    """Parse a number of lines."""
    if not re.fullmatch("[0-9]{1,9}", text):
        raise argparse.ArgumentTypeError(f"{quoted(text)} is not a number of lines")
    return int(text)


def port(text: str) -> int:
    """Parse a TCP port."""
    if not re.fullmatch("[0-9]{1,5}", text) or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{quoted(text)} is not a port")
    return int(text)


def pattern(text: str) -> Any:
    """Compile a regular expression, whose searches can be limited in time."""
    from orchestrate.spec import patterns

    try:
        return patterns.compiled(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{quoted(text)} is not a regular expression: {error}") from None


def duration(text: str) -> float:
    """Parse a duration, in seconds."""
    from orchestrate.spec.values import LONG

    try:
        return float(LONG.parse(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{quoted(text)} is not {error}") from None


def folder(text: str) -> Path:
    """Check the folder of `--runs`, which may not exist yet."""
    try:
        if not text or not stat.S_ISDIR(os.stat(text).st_mode):
            raise argparse.ArgumentTypeError(f"{quoted(text)} is not a folder")
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise argparse.ArgumentTypeError(f"{quoted(text)} cannot be used: {why}") from None
    return Path(text)
