"""The commands and their options."""

from __future__ import annotations

import argparse
import os
import re
import stat
from pathlib import Path
from typing import Any

from orchestrate import __version__
from orchestrate.cli.parser import EXPORTS, Parser, Subparsers
from orchestrate.console import called
from orchestrate.job.spec import description
from orchestrate.job.strict_yaml import shown
from orchestrate.job.values import LONG

FLAGS = {  # job file keys that are also options, with their metavars
    "trainers": "N",
    "nproc_per_node": "N",
    "gpus": "auto|all|none|N",
    "engine": "auto|docker|process|swarm",
    "image": "NAME",
    "dockerfile": "DIR",
    "requirements": "FILE",
    "source": "DIR|git+URL",
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
SWITCHES = ("require_communication", "isolated", "stdin")  # keys that are options without a value
RUNS = Path("runs")
RUN_COMMANDS = {
    "run": "run a job until it ends",
    "plan": "print the rank assignment without creating anything",
    "up": "start a cluster: nodes that stay up for later jobs",
}
JOB_COMMANDS = {
    "logs": "print the output of a job's workers",
    "events": "print what happened to a job, and when",
    "top": "show what the workers of a running job use: CPU, memory, GPUs",
    "report": "write a page about jobs that have ended: report.html",
    "attach": "follow a job until it ends; take over if it has no supervisor",
    "resume": "continue a job that was stopped or failed, from its last checkpoint",
    "wait": "wait until a job ends, and exit with its exit code",
    "stop": "stop a job and remove its nodes",
    "rm": "remove a job that has ended, with its files and any leftover nodes",
}
LATEST_BY_DEFAULT = ("logs", "events", "top", "report", "attach", "resume", "wait")  # commands whose JOB is optional
LATEST = "latest"
COMMAND = "[[--] SCRIPT.py ARGS | -m MODULE ARGS | PROGRAM ARGS]"
EXITS = """\
exit codes:
  0    succeeded                   4    something is missing: image, GPUs, Compose
  1    a worker failed             5    lost: the engine stopped responding
  2    bad usage or job file       124  the time limit --max-run was reached
  3    no engine, no object store  130  stopped by the user
"""


def parser() -> Parser:
    """Return the parser of the command line, without the job's own command."""
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
    _add_other_commands(subparsers)
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
        if name == "plan":
            command.add_argument("--json", action="store_true", help="print the plan as JSON")
        if name == "run":
            command.add_argument("--dry-run", action="store_true", help="print the plan without creating anything")
            _add_stdout_options(command)
            command.add_argument("--resume", type=_job, metavar="JOB", help="continue this job, as `resume` does")
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


def _add_other_commands(subparsers: Subparsers) -> None:
    command = subparsers.add_parser(
        "down",
        help="remove a cluster that was started by up",
        description="Remove a cluster's nodes and files, but not the files of its jobs.",
    )
    command.add_argument("cluster", type=_name, metavar="CLUSTER", help="name or unique prefix")
    _add_dry_run(command)
    _add_runs(command)
    command = subparsers.add_parser(
        "ps", help="list running jobs and clusters", description="List running jobs and clusters."
    )
    command.add_argument("-a", "--all", action="store_true", help="list also the jobs that have ended")
    command.add_argument("--json", action="store_true", help="print a list of objects as JSON")
    _add_runs(command)
    command = subparsers.add_parser(
        "prune",
        help="remove jobs that ended long ago, and caches",
        description="Remove the run directories of jobs that ended long ago, and caches of packages, data and sources.",
    )
    command.add_argument(
        "--older-than", type=_duration, default="30d", metavar="DURATION", help="time since their end (default: 30d)"
    )
    command.add_argument("--caches", action="store_true", help="also remove the caches, which jobs fill again")
    _add_dry_run(command)
    _add_runs(command)
    command = subparsers.add_parser(
        "serve",
        help="show jobs in a web browser on this machine",
        description="Serve a web page on this machine that lists jobs, follows running ones, and shows reports.",
    )
    command.add_argument("--port", type=_port, default=6007, metavar="PORT", help="default: 6007; 0 chooses a free one")
    _add_runs(command)


def _add_job_commands(subparsers: Subparsers) -> None:
    for name, summary in JOB_COMMANDS.items():
        command = subparsers.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        optional: dict[str, Any] = {"nargs": "?", "default": LATEST} if name in LATEST_BY_DEFAULT else {}
        job_help = "id, unique prefix, run directory, or latest" + " (default)" * bool(optional)
        command.add_argument("job", type=_job, metavar="JOB", help=job_help, **optional)
        _add_runs(command)
        if name in ("attach", "resume"):
            _add_stdout_options(command)
        if name == "logs":
            _add_log_options(command)
        if name == "report":
            command.add_argument(
                "others", nargs="*", type=_job, metavar="OTHER", help="jobs to compare it with, in RUNS/report.html"
            )
        if name == "top":
            command.add_argument("--once", action="store_true", help="print the table once, and exit")
        if name in ("logs", "events"):
            command.add_argument("-f", "--follow", action="store_true", help="follow the job until it ends")
        if name in ("stop", "rm"):
            _add_dry_run(command)


def _add_log_options(command: argparse.ArgumentParser) -> None:
    _add_ranks(command)
    command.add_argument("--merge", action="store_true", help="sort the lines of all ranks by time")
    command.add_argument(
        "--since", type=_duration, metavar="DURATION", help="print only lines of the last 5m, for example"
    )
    command.add_argument(
        "--tail", type=_count, metavar="N", help="print only the last N lines of each rank, and what follows"
    )
    command.add_argument(
        "--grep", type=_pattern, metavar="REGEX", help="print only lines that match this regular expression"
    )
    command.add_argument("--rank", type=int, metavar="N", help="print only the output of this rank, without prefixes")


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
        "--data",
        action="append",
        default=[],
        metavar="NAME=DIR",
        help="make a folder available to workers, at the path in $DATA_NAME; may be repeated",
    )
    command.add_argument(
        "--secret",
        action="append",
        default=[],
        metavar="NAME[=FILE]",
        help="make a secret available as a file, at the path in $NAME_FILE: the content of FILE, or the value of the "
        "variable NAME of this shell; may be repeated",
    )
    command.add_argument(
        "--mount",
        action="append",
        dest="mounts",
        metavar="DIR:PATH[:rw]",
        help="mount a folder of this machine in nodes, read-only unless :rw; may be repeated",
    )
    command.add_argument(
        "--pip",
        action="append",
        metavar="PACKAGE",
        help="install a Python package, such as lightning or 'transformers>=4'; may be repeated",
    )
    command.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="set a key of the job file, such as shm_size=4g"
    )


def _add_stdout_options(command: argparse.ArgumentParser) -> None:
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
    _add_ranks(command)


def _add_dry_run(command: argparse.ArgumentParser) -> None:
    """Add the option of commands that remove something."""
    command.add_argument("--dry-run", action="store_true", help="print what would be removed, and exit")


def _add_ranks(command: argparse.ArgumentParser) -> None:
    """Add the options that select and mark lines of workers."""
    command.add_argument("--ranks", metavar="N,N-N", help="print only the output of these ranks")
    command.add_argument("-t", "--timestamps", action="store_true", help="print the time of each line")


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


def _count(text: str) -> int:
    """Parse a number of lines."""
    if not re.fullmatch("[0-9]{1,9}", text):
        raise argparse.ArgumentTypeError(f"{shown(text)} is not a number of lines")
    return int(text)


def _port(text: str) -> int:
    """Parse a TCP port."""
    if not re.fullmatch("[0-9]{1,5}", text) or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{shown(text)} is not a port")
    return int(text)


def _pattern(text: str) -> re.Pattern[str]:
    """Compile a regular expression."""
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{shown(text)} is not a regular expression: {error}") from None


def _duration(text: str) -> float:
    """Parse a duration, in seconds."""
    try:
        return float(LONG.parse(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{shown(text)} is not {error}") from None


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
