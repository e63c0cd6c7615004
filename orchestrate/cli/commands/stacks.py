"""`stacks`: where the workers of a running job are in their code."""

from __future__ import annotations

import os
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence

from orchestrate import console, errors
from orchestrate.cli import display, find, options, waiting
from orchestrate.cli.args import Args
from orchestrate.cli.parser import Parser
from orchestrate.clock import Clock
from orchestrate.errors import OrchestrateError, UsageError
from orchestrate.files.paths import WORK
from orchestrate.node.messages import protocol
from orchestrate.record import lock, run_dir, stacks
from orchestrate.record.outcomes import Stack
from orchestrate.record.paths import JobPaths
from orchestrate.supervise.hang import STATES
from orchestrate.supervise.stacks import folded, frames, grouped, position, processes

INTERVAL, TIMEOUT = 0.02, 15.0  # seconds between two looks for an answer, and to wait for it
WHY = {
    protocol.STARTING: "not started yet",
    protocol.UNABLE: "no stack, since it is not a script that was started warm",
    protocol.SILENT: "no answer",
    "": "not in Python code",
}


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `stacks`."""
    options.add_job_name(parser, latest=True)
    options.add_runs(parser)
    parser.add_argument("--ranks", metavar="N,N-N", help="show only these ranks")


def run(args: Args) -> int:
    """Print where each worker is; those with equal stacks are one group, and small groups come first."""
    paths = find.paths_of(args)
    spec, plan = run_dir.load(paths)
    size, hide = len(plan.workers), spec.mask()
    wanted = display.ranks(args.ranks, size) if args.ranks else range(size)
    waiting.check_started(paths)
    found = _ask(paths, args.clock)
    texts = {rank: _described(found.get(rank), whole=args.verbose) for rank in wanted}
    for folder in (f"{plan.placement.job_dir}/{WORK}/", f"{os.getcwd()}/"):
        texts = {rank: text.replace(folder, "") for rank, text in texts.items()}
    for ranks, text in grouped(texts):
        console.out(hide(f"{_named(ranks)}: {text}"))
    return errors.SUCCEEDED


def _described(stack: Stack | None, whole: bool) -> str:
    """Return what a worker and its child processes are doing, and their stacks, with all frames if `whole`."""
    if not stack:
        return "ended"
    own, children = processes(stack.text)
    known = _shown(own, whole) or STATES.get(stack.state, "").removeprefix("is ") or WHY.get(stack.why, WHY[""])
    below = [f"{_counted(count)}: {text}" for text, count in Counter(_shown(each, whole) for each in children).items()]
    return "\n".join([known, *(textwrap.indent(part, "  ") for part in below)])


def _shown(stack: str, whole: bool) -> str:
    """Return where a process is, and its frames; empty if it is not in Python code."""
    found = position(stack)
    if not found:
        return ""
    shown = frames(stack) if whole else folded(frames(stack))
    return f"{'in a debugger' if found.debugged else 'waiting' if found.waits else 'running'} at {found.where}\n{shown}"


def _counted(children: int) -> str:
    return f"{children} child processes" if children > 1 else "a child process"


def _named(ranks: Sequence[int]) -> str:
    """Return the names of ranks, such as `rank 1` or `ranks 0-2, 5`."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][-1] + 1:
            parts[-1][1:] = [rank]
        else:
            parts.append([rank])
    return f"rank{'s' * (len(ranks) > 1)} {', '.join('-'.join(map(str, part)) for part in parts)}"


def _ask(paths: JobPaths, clock: Clock) -> Mapping[int, Stack]:
    """Return the stacks of running workers, by rank; raises OrchestrateError if the supervisor does not respond."""
    deadline = clock.monotonic() + TIMEOUT
    stacks.remove(paths)  # of a command that was killed
    try:
        while (found := stacks.read(paths)) is None:
            if not stacks.asked(paths):  # again, if another command has removed question and answer
                stacks.ask(paths)
            if run_dir.ended(paths):
                raise UsageError(f"{paths.root.name} has ended", f"python -m orchestrate logs {paths.root.name}")
            if not lock.supervisor(paths):
                run_dir.unsupervised(paths)
            if clock.monotonic() > deadline:
                what = f"the supervisor of {paths.root.name} does not respond"
                raise OrchestrateError(what, "try again once the workers have started")
            clock.sleep(INTERVAL)
    finally:
        stacks.remove(paths)
    return found
