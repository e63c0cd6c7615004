"""The command line."""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

from orchestrate import __version__, cluster, commands, errors, job, lock, owners, terminal
from orchestrate.errors import OrchestrateError, UsageError
from orchestrate.paths import PACKAGE, JobPaths
from orchestrate.plan import Inventory, counted, plan
from orchestrate.redact import HIDDEN
from orchestrate.report import text
from orchestrate.spec import JobSpec, read_file, read_set, resolve, unencodable
from orchestrate.strict_yaml import shown
from orchestrate.terminal import give, out, say

FLAGS = {  # fields of the job file that are flags, too
    "trainers": "N",
    "gpus": "all|none|N",
    "nproc_per_node": "N",
    "engine": "auto|docker|process|swarm",
    "image": "NAME",
    "name": "NAME",
    "max_run": "2h",
    "max_restarts": "N",
    "min_trainers": "N",
    "spares": "N",
}
RUNS = Path("runs")
RUN_COMMANDS = {
    "run": "run a job to its end",
    "plan": "print who would be which rank, and end",
    "up": "bring up nodes that stay, for jobs to come",
}
JOB_COMMANDS = {
    "logs": "print the workers' output",
    "attach": "follow a job to its end, and supervise it where nobody does",
    "wait": "wait for the end of a job, and end with its exit code",
    "stop": "stop a job and remove its nodes",
    "rm": "remove the files of a job that has ended, and all that it may have left",
}
EXPORTS = {"kubernetes": ("job", "jobset", "trainjob"), "slurm": ("venv", "apptainer", "pyxis"), "compose": ()}
EXITS = """\
exit codes:
  0    succeeded                   4    something is missing: image, GPUs, Compose
  1    a worker failed             5    lost: the engine does not answer any more
  2    usage or job file           124  --max-run was over
  3    no engine, or it refused    130  stopped by a person
"""


class Parser(argparse.ArgumentParser):
    """Errors in our own form: what, and what next."""

    def error(self, message: str) -> NoReturn:
        """Raise UsageError."""
        raise UsageError(message, f"{self.prog} --help")


def parser() -> Parser:
    """The command line."""
    top = Parser(
        prog="python -m orchestrate",
        description="Run any PyTorch distributed program as a real multi-node job in containers.",
        epilog=EXITS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=__version__)
    kinds = top.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=Parser)
    for name, description in RUN_COMMANDS.items():
        command = kinds.add_parser(
            name,
            help=description,
            description=f"{description[0].upper()}{description[1:]}.",
            usage="%(prog)s [JOB.yaml] [options]" + " [-- SCRIPT ARGS | -- -m MODULE ARGS]" * (name != "up"),
        )
        _add_job(command)
        if name == "run":
            command.add_argument("--dry-run", action="store_true", help="print the plan, create nothing")
            command.add_argument(
                "--detach", action="store_true", help="leave the job to a supervisor in the background"
            )
        _add_runs(command)
    command = kinds.add_parser(
        "doctor",
        help="look for what keeps jobs from running here",
        description="Look for what keeps jobs from running on this engine, and on the hosts of its Swarm.",
    )
    _add_job(command)
    command = kinds.add_parser(
        "export",
        help="print the job as a file for another engine",
        description="Print the job as a file for an engine that others maintain.",
        usage="%(prog)s kubernetes|slurm|compose [JOB.yaml] [options] [-- SCRIPT ARGS | -- -m MODULE ARGS]",
    )
    targets = command.add_subparsers(
        dest="target", metavar="|".join(EXPORTS), required=True, prog=f"{top.prog} export", parser_class=Parser
    )
    for target, forms in EXPORTS.items():
        command = targets.add_parser(
            target,
            help=", ".join(forms) or "a plain file",
            usage="%(prog)s [JOB.yaml] [options] [-- SCRIPT ARGS | -- -m MODULE ARGS]",
        )
        command.add_argument(
            "--form",
            metavar="FORM",
            help=f"{', '.join(forms)}; the first is the default" if forms else argparse.SUPPRESS,
        )
        _add_job(command)
    command = kinds.add_parser("down", help="take down what up brought up", description="Take a cluster down.")
    command.add_argument("cluster", type=_name, metavar="CLUSTER", help="its name, or how it begins")
    command.add_argument("--dry-run", action="store_true", help="print what would be removed, and end")
    _add_runs(command)
    _add_runs(kinds.add_parser("ps", help="list jobs and clusters", description="List the jobs and clusters."))
    for name, description in JOB_COMMANDS.items():
        command = kinds.add_parser(name, help=description, description=f"{description[0].upper()}{description[1:]}.")
        command.add_argument("job", type=_name, metavar="JOB", help="its id, or how it begins")
        _add_runs(command)
        if name == "logs":
            command.add_argument("--rank", type=int, metavar="N", help="of one worker alone, without prefix")
            command.add_argument("-f", "--follow", action="store_true", help="go on until the job ends")
        if name in ("stop", "rm"):
            command.add_argument("--dry-run", action="store_true", help="print what would be removed, and end")
    return top


def _add_job(command: argparse.ArgumentParser) -> None:
    command.add_argument("file", nargs="?", type=Path, metavar="JOB.yaml", help="job file; flags win over it")
    for field in dataclasses.fields(JobSpec):
        if field.name in FLAGS:
            flag = "--" + field.name.replace("_", "-")
            command.add_argument(flag, metavar=FLAGS[field.name], help=field.metadata["doc"])
    command.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any key of the job file")


def _add_runs(command: argparse.ArgumentParser) -> None:
    command.add_argument("--runs", type=_folder, metavar="DIR", help=f"where jobs leave their files (default {RUNS})")


def _name(text: str) -> str:
    """The name of a job or cluster, or how it begins: as `job.new_id` makes names, so that none is a path."""
    if not re.fullmatch("[a-z0-9-]{1,63}", text):
        raise argparse.ArgumentTypeError(f"{shown(text)} is not a name of lower-case letters, digits and hyphens")
    return text


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


def main(argv: list[str]) -> int:
    """Run a command; return its exit code. All that it printed is written then, for the process ends at once."""
    terminal.prepare()
    code = _guarded(argv)
    if failure := terminal.finish():
        say(f"error: not all of the output was written: {failure}")
        terminal.finish()
        code = code or errors.FAILED
    return code


def _guarded(argv: list[str]) -> int:
    """Run a command; tell what went wrong."""
    try:
        return _command(argv)
    except OrchestrateError as error:
        say(f"error: {error}")
        if error.hint:
            say(f"hint: {error.hint}")
        return error.exit_code
    except KeyboardInterrupt:
        say("stopped")
        return errors.INTERRUPTED
    except SystemExit:  # argparse has printed the help or the version
        return errors.SUCCEEDED
    except terminal.Closed:
        return errors.SUCCEEDED
    except OSError as error:  # a full disk, a file of another user
        say(f"error: {error.strerror or error}" + f": {error.filename}" * bool(error.filename))
        return errors.FAILED


def _command(argv: list[str]) -> int:
    words, script = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, None)
    args = parser().parse_args(words)
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UsageError("the current folder does not exist any more", "cd to a folder that does") from None
    if "runs" in args:
        _check_link(args)
        args.shown, args.runs = args.runs, owners.check(args.runs)
    if args.command == "doctor":
        return commands.doctor(_spec(args, script))
    if args.command == "export":
        return _export(args, script)
    if args.command in RUN_COMMANDS and not (args.command == "up" and script is not None):
        return _run(args, script)
    if script is not None:
        raise UsageError(f"{args.command} takes nothing behind --", f"python -m orchestrate {args.command} --help")
    return commands.BY_NAME[args.command](args)


def _check_link(args: argparse.Namespace) -> None:
    """Raise UsageError if files would go where a link leads that may have come with a project."""
    if args.command in RUN_COMMANDS and args.runs is None and RUNS.is_symlink():
        raise UsageError(f"{RUNS} is a link, and jobs would be where it leads", "--runs DIR names that folder")
    args.runs = args.runs or RUNS


def _spec(args: argparse.Namespace, script: list[str] | None) -> JobSpec:
    """The job that the command line asks for."""
    flags = {name: value for name in FLAGS if (value := getattr(args, name)) is not None}
    layers = [read_file(args.file) if args.file else {}, read_set(args.set), flags]
    if script is not None:
        layers.append({"command": script})
    spec = resolve(*layers)
    if name := next((name for name, value in spec.env.items() if value == HIDDEN), ""):
        raise UsageError(
            f"env.{name} is {HIDDEN}, which job.yaml has in the place of a secret",
            f"set it in your own job file, or with --set env.{name}=VALUE",
        )
    if why := unencodable(spec):
        raise UsageError(why, "export LC_ALL=C.UTF-8")
    return job.check_script(spec)


def _export(args: argparse.Namespace, script: list[str] | None) -> int:
    from orchestrate.export.compose import compose
    from orchestrate.export.kubernetes import kubernetes
    from orchestrate.export.slurm import slurm

    forms = EXPORTS[args.target] or ("",)
    form = args.form or forms[0]
    if form not in forms:
        raise UsageError(f"--form {form}", f"{args.target} has {', '.join(forms)}" if forms[0] else "compose has none")
    spec = _spec(args, script)
    name = job.slug(spec)
    write = {"kubernetes": kubernetes, "slurm": slurm}
    text = write[args.target](spec, name, form) if args.target in write else compose(spec, name)
    terminal.copy(text)
    return errors.SUCCEEDED


def _run(args: argparse.Namespace, script: list[str] | None) -> int:
    spec = _spec(args, script)
    if args.command == "up":
        return _up(spec, args.runs)
    dry = args.command == "plan" or args.dry_run
    engine = commands.engine_of(spec)
    job_id = job.new_id(spec)
    paths = JobPaths(args.runs / job_id)
    inventory = engine.inventory(spec, paths.shared, prepare=not dry)
    made = plan(spec, _place(spec, inventory, job_id, paths.root.parent), job_id, engine.port(spec, 0))
    if dry:
        out(made)
        return errors.SUCCEEDED
    stops = commands.count_signals(spec) if not args.detach else lambda: 0
    job.create(spec, made, paths)
    say(str(made))
    if args.detach:
        _detach(paths, args.shown)
        return errors.SUCCEEDED
    data = job.supervise(paths, engine, stops, say)
    say(text(data))
    give(args.shown / job_id)
    return commands.exit_code(data)


def _up(spec: JobSpec, runs: Path) -> int:
    name = spec.name or "cluster"
    made = cluster.bring_up(commands.engine_of(spec), dataclasses.replace(spec, name=name), runs)
    nodes = len(made.plan.nodes)
    be = "is" if nodes == 1 else "are"
    say(f"{counted(nodes, 'node')} {be} up, for jobs from {made.plan.inventory.code}")
    say(f"hint: python -m orchestrate run uses them; python -m orchestrate down {made.name} removes them")
    out(made.name)
    return errors.SUCCEEDED


def _place(spec: JobSpec, inventory: Inventory, job_id: str, runs: Path) -> Inventory:
    """The nodes of the first cluster that fits a job; its own where none does, with the reasons."""
    for one in cluster.found(runs):
        placed = one.place(inventory, job_id)
        differences = one.differences(spec, plan(spec, placed, job_id, 0))
        if not differences:
            return placed
        say(f"{one.name} does not fit: {'; '.join(differences)}")
    return inventory


def _detach(paths: JobPaths, shown: Path) -> None:
    """Have a process of its own supervise a job, whose folder is shown as in `shown`; return once it does."""
    run = shown / paths.root.name
    safe = ["-I"] if sys.flags.isolated else ["-P"] if getattr(sys.flags, "safe_path", False) else []
    command = [sys.executable, *safe, "-m", "orchestrate", "attach", run.name, "--runs", str(paths.root.parent)]
    with open(paths.supervisor_log, "w", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
        child = subprocess.Popen(
            command,
            cwd=PACKAGE.parent,  # `-m` looks in the current folder first, where another orchestrate.py may be
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    while not lock.holder(paths) and not job.ended(paths) and child.poll() is None:
        time.sleep(0.02)
    child.returncode = child.returncode or 0  # it outlives us
    say(f"hint: python -m orchestrate attach {run.name}; its supervisor writes to {run / 'supervisor.log'}")
    out(run)
