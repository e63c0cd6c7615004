"""`top`: what the workers of a running job use."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from orchestrate import console, errors
from orchestrate.cli import find, options, waiting
from orchestrate.cli.args import Args
from orchestrate.cli.parser import Parser
from orchestrate.clock import Clock
from orchestrate.errors import OrchestrateError, UsageError
from orchestrate.host import gpus
from orchestrate.record import lock, run_dir, usage
from orchestrate.record.paths import JobPaths

if TYPE_CHECKING:
    from orchestrate.show.top import Top


INTERVAL = 1.0  # seconds between two samples
TIMEOUT = 15.0  # seconds to wait for the first two


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `top`."""
    options.add_job_name(parser, latest=True)
    options.add_runs(parser)
    parser.add_argument("--once", action="store_true", help="print the table once, and exit")


def run(args: Args) -> int:
    """Show CPU, memory and GPU use of each worker until the job ends; without a terminal, once."""
    from orchestrate.show.top import Top, full_screen  # only here: it imports rich

    paths = find.paths_of(args)
    spec, plan = run_dir.load(paths)
    if run_dir.ended(paths):
        raise UsageError(f"{paths.root.name} has ended", f"python -m orchestrate report {paths.root.name}")
    waiting.check_started(paths)
    state = Top(plan, spec.cpus or len(plan.inventory.cores) or 1)
    live = console.replaces(sys.stdout) and not args.once
    with contextlib.suppress(KeyboardInterrupt), full_screen(state) if live else contextlib.nullcontext() as draw:
        for count in samples(paths, state, args.clock):
            if draw:
                draw()
            elif count == 2:
                break
    if not live:
        for line in state.lines():
            console.out(line)
    return errors.SUCCEEDED


def samples(paths: JobPaths, state: Top, clock: Clock) -> Iterator[int]:
    """Record samples until the job ends; yield their number so far. Raises OrchestrateError if there are none."""
    count, deadline, has_gpus = 0, clock.monotonic() + TIMEOUT, bool(state.plan.gpus)
    while not run_dir.ended(paths):
        if not lock.supervisor(paths) and not run_dir.ended(paths):
            run_dir.unsupervised(paths)
        usage.ask(paths)
        written, found = usage.read(paths)
        if written > state.last[0] and found:
            state.record(written, found)
            if has_gpus:
                state.take_gpus(gpus.utilization())
            count += 1
            yield count
        elif count < 2 and clock.monotonic() > deadline:
            raise OrchestrateError(
                f"the supervisor of {paths.root.name} does not report what its workers use",
                "try again once they have started",
            )
        clock.sleep(INTERVAL / 2)
