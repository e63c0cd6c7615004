"""`exec`: a command beside a worker, with its environment and working directory."""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Sequence

from orchestrate import console, errors
from orchestrate.cli import find, options, waiting
from orchestrate.cli.args import Args
from orchestrate.cli.parser import Parser
from orchestrate.engines import registry
from orchestrate.engines.base import Local
from orchestrate.errors import ResourceError, UsageError
from orchestrate.plan.plan import WorkerPlan
from orchestrate.record import run_dir
from orchestrate.record.paths import JobPaths


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `exec`."""
    options.add_job_name(parser, latest=True)
    options.add_runs(parser)
    where = parser.add_mutually_exclusive_group()
    add_node(where)
    where.add_argument("--all", action="store_true", help="run it on each node, one after the other")


def add_node(group: argparse._ActionsContainer) -> None:
    """Add the options that select a worker."""
    group.add_argument("--node", metavar="NAME", help="run it beside the first worker of this node (default: master)")
    group.add_argument("--rank", type=int, metavar="N", help="run it beside this worker")


def run(args: Args) -> int:
    """Run a command beside one worker, or one of each node; return its exit code, or the first that is not 0."""
    return beside(args, args.script or (), terminal=False)


def beside(args: Args, command: Sequence[str], terminal: bool) -> int:
    """Run a command beside the workers that the options select, and return its exit code."""
    if not command:
        raise UsageError("no command: it comes after --", f"{console.called()} exec JOB -- nvidia-smi")
    paths = find.paths_of(args)
    spec, plan = run_dir.load(paths)
    name = paths.root.name
    if run_dir.ended(paths):
        raise UsageError(f"{name} has ended", f"{console.called()} logs {name}")
    waiting.check_started(paths)
    firsts: dict[str, WorkerPlan] = {}
    for worker in plan.workers:
        firsts.setdefault(worker.node, worker)
    workers = [*firsts.values()] if args.all else [_selected(args, plan.workers, firsts)]
    engine, codes = registry.of_plan(spec, plan), list[int]()
    seen = JobPaths(paths.root.parent / paths.cluster).nodes if paths.cluster else paths.shared
    for worker in workers:
        if len(workers) > 1:
            console.out(f"{worker.node}:")
        local = engine.inside(spec, plan, seen, worker, terminal)
        codes.append(_run(local._replace(words=[*local.words, *command])))
    return next(filter(None, codes), errors.SUCCEEDED)


def _selected(args: Args, workers: Sequence[WorkerPlan], firsts: dict[str, WorkerPlan]) -> WorkerPlan:
    """Return the worker that the options select; raises UsageError."""
    if args.rank is not None and not 0 <= args.rank < len(workers):
        raise UsageError(f"there is no rank {args.rank}", f"ranks are 0 to {len(workers) - 1}")
    if args.node and args.node not in firsts:
        raise UsageError(f"there is no node {console.quoted(args.node)}", f"nodes are {', '.join(firsts)}")
    return firsts[args.node] if args.node else workers[args.rank or 0]


def _run(command: Local) -> int:
    """Run a command with our terminal, and return its exit code, 128 + n if signal n ended it."""
    console.flush()
    try:
        files = [file.fileno() for file in command.files]
        process = subprocess.Popen(command.words, env=dict(command.env), cwd=command.cwd, pass_fds=files)
    except FileNotFoundError:
        raise ResourceError(f"{command.words[0]} was not found", "give its path") from None
    with process:
        while True:
            try:
                code = process.wait()
                return 128 - code if code < 0 else code
            except KeyboardInterrupt:  # which the command gets as well
                continue
