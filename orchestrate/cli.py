"""The commands. The only module that prints: data to stdout, everything for human eyes to stderr."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from orchestrate import __version__, errors, job, lock, logs
from orchestrate.errors import OrchestrateError, UsageError
from orchestrate.paths import JobPaths
from orchestrate.plan import plan
from orchestrate.report import text
from orchestrate.spec import JobSpec, read_file, read_set, resolve

if TYPE_CHECKING:
    from orchestrate.engines import Engine, JobState

FLAGS = {  # fields of the job file that are flags, too
    "trainers": "N",
    "gpus": "all|none|N",
    "nproc_per_node": "N",
    "engine": "auto|docker|process",
    "image": "NAME",
    "name": "NAME",
    "max_run": "2h",
}
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
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=Parser)
    for name, description in (("run", "run a job to its end"), ("plan", "print who would be which rank, and end")):
        command = commands.add_parser(
            name,
            help=description,
            description=f"{description[0].upper()}{description[1:]}.",
            usage="%(prog)s [JOB.yaml] [options] [-- SCRIPT ARGS | -- -m MODULE ARGS]",
        )
        command.add_argument("file", nargs="?", type=Path, metavar="JOB.yaml", help="job file; flags win over it")
        for field in dataclasses.fields(JobSpec):
            if field.name in FLAGS:
                flag = "--" + field.name.replace("_", "-")
                command.add_argument(flag, metavar=FLAGS[field.name], help=field.metadata["doc"])
        command.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any key of the job file")
        if name == "run":
            command.add_argument("--dry-run", action="store_true", help="print the plan, create nothing")
        _add_runs(command)
    _add_runs(commands.add_parser("ps", help="list the jobs that have nodes", description="List the jobs."))
    for name, description in (("logs", "print the workers' output"), ("stop", "stop a job and remove its nodes")):
        command = commands.add_parser(name, help=description, description=f"{description[0].upper()}{description[1:]}.")
        command.add_argument("job", metavar="JOB", help="its id, or how it begins")
        _add_runs(command)
        if name == "logs":
            command.add_argument("--rank", type=int, metavar="N", help="of one worker alone, without prefix")
            command.add_argument("-f", "--follow", action="store_true", help="go on until the job ends")
    return top


def _add_runs(command: argparse.ArgumentParser) -> None:
    command.add_argument("--runs", type=Path, default=Path("runs"), metavar="DIR", help="where jobs leave their files")


def main(argv: list[str]) -> int:
    """Run a command; return its exit code."""
    words, script = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, None)
    try:
        args = parser().parse_args(words)
        if args.command in ("run", "plan"):
            return _run(args, script)
        if script is not None:
            raise UsageError(f"{args.command} takes nothing behind --", f"python -m orchestrate {args.command} --help")
        return {"ps": _ps, "logs": _logs, "stop": _stop}[args.command](args)
    except OrchestrateError as error:
        say(f"error: {error}")
        if error.hint:
            say(f"hint: {error.hint}")
        return error.exit_code
    except KeyboardInterrupt:
        say("stopped")
        return errors.INTERRUPTED
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return errors.SUCCEEDED


def say(line: str) -> None:
    """Print a line for human eyes; nobody may be looking any more."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def _run(args: argparse.Namespace, script: list[str] | None) -> int:
    flags = {name: value for name in FLAGS if (value := getattr(args, name)) is not None}
    layers = [read_file(args.file) if args.file else {}, read_set(args.set), flags]
    if script is not None:
        layers.append({"command": script})
    spec = job.check_script(resolve(*layers))
    dry = args.command == "plan" or args.dry_run
    engine = _engine(spec)
    job_id = job.new_id(spec)
    paths = JobPaths(args.runs.resolve() / job_id)
    made = plan(spec, engine.inventory(spec, paths.root, prepare=not dry), job_id)
    if dry:
        print(made)
        return errors.SUCCEEDED
    stops = _count_signals(spec)
    try:
        paths.create()
    except OSError as error:
        raise UsageError(f"cannot write to {paths.root}: {error.strerror}", "--runs names another folder") from None
    say(str(made))
    data = job.run(spec, made, paths, engine, stops, say)
    say(text(data))
    with contextlib.suppress(BrokenPipeError):  # the job's end is not its reader's
        print(args.runs / job_id, flush=True)
    return _exit_code(data)


def _exit_code(data: dict[str, Any]) -> int:
    if data["outcome"] == "stopped":
        return errors.TIMED_OUT if data["reason"] == "max_run" else errors.INTERRUPTED
    return {"succeeded": errors.SUCCEEDED, "failed": errors.FAILED, "lost": errors.LOST}[data["outcome"]]


def _count_signals(spec: JobSpec) -> Any:
    """Take Ctrl-C, SIGTERM and SIGHUP as requests to stop; return what counts them."""
    seen: list[int] = []

    def note(number: int, _: object) -> None:
        seen.append(number)
        if len(seen) == 1:
            say(f"stopping: the workers have {spec.grace:g} s to end; Ctrl-C again kills them")
        else:
            say("killing the workers")

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, note)
    return lambda: len(seen)


def _engine(spec: JobSpec) -> Engine:
    """The engine that the job asks for, or that answers."""
    if spec.engine != "process":
        from orchestrate.engines.docker import DockerEngine  # the SDK takes half a second to import

        try:
            return DockerEngine()
        except OrchestrateError as error:
            if spec.engine == "docker":
                raise
            say(f"{error}; running local processes instead of containers. To get containers: start Docker.")
    from orchestrate.engines.process import ProcessEngine

    return ProcessEngine()


def _engines() -> list[Engine]:
    """All engines that answer."""
    from orchestrate.engines.docker import DockerEngine
    from orchestrate.engines.process import ProcessEngine

    try:
        return [DockerEngine(), ProcessEngine()]
    except OrchestrateError:
        return [ProcessEngine()]


def _ps(args: argparse.Namespace) -> int:
    rows = [("JOB", "ENGINE", "NODES", "STATE", "RUN")]
    for engine in _engines():
        for state in engine.jobs():
            word = "running" if lock.holder(JobPaths(state.run)) else "without supervisor"
            rows.append((state.job_id, state.engine, str(state.nodes), word, str(state.run)))
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
    return errors.SUCCEEDED


def _find(args: argparse.Namespace, states: list[JobState]) -> Path:
    """The run directory of the job that `args.job` names or begins, living or ended."""
    living = {state.job_id: state.run for state in states}
    runs: dict[str, Path] = {path.parent.name: path.parent for path in args.runs.glob("*/plan.json")} | living
    found = [args.job] if args.job in runs else [name for name in living if name.startswith(args.job)]
    found = found or sorted(name for name in runs if name.startswith(args.job))
    if len(found) != 1:
        which = "no job" if not found else "several jobs"
        known = ", ".join(sorted(found or runs)[:8]) or f"none in {args.runs}"
        raise UsageError(f"{which} {args.job}", f"jobs here: {known}")
    return runs[found[0]]


def _logs(args: argparse.Namespace) -> int:
    local = args.runs.joinpath(args.job, "plan.json").exists()
    paths = JobPaths(_find(args, [] if local else [state for engine in _engines() for state in engine.jobs()]))
    nodes = {worker["rank"]: worker["node"] for worker in json.loads(paths.plan.read_text())["workers"]}
    if args.rank is not None and args.rank not in nodes:
        raise UsageError(f"no rank {args.rank} in {paths.root.name}", f"its ranks are 0 to {len(nodes) - 1}")
    chosen = logs.prefixes(nodes) if args.rank is None else {args.rank: ""}
    follower = logs.Follower(paths, chosen)
    while True:
        living = args.follow and lock.holder(paths)
        for line in follower.lines(end=not living):
            print(line)
        if not living:
            return errors.SUCCEEDED
        sys.stdout.flush()
        time.sleep(0.1)


def _stop(args: argparse.Namespace) -> int:
    engines = {state.job_id: (engine, state) for engine in _engines() for state in engine.jobs()}
    paths = JobPaths(_find(args, [state for _, state in engines.values()]))
    name = paths.root.name
    supervisor = lock.holder(paths)
    if supervisor:
        say(f"asking the supervisor of {name} to stop")
        os.kill(supervisor, signal.SIGTERM)
        while lock.holder(paths) == supervisor:
            time.sleep(0.1)
    elif name in engines:
        say(f"{name} has no supervisor: removing its nodes")
        engines[name][0].remove(name, grace=30)
    else:
        say(f"{name} has ended already")
        return errors.SUCCEEDED
    say(f"{name} is stopped")
    return errors.SUCCEEDED
