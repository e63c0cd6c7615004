"""Waiting for a job that another process supervises."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import datetime, timedelta

from orchestrate import console, errors
from orchestrate.cli.args import Args
from orchestrate.clock import Clock
from orchestrate.console import print_message
from orchestrate.errors import EngineError, UsageError
from orchestrate.host import slurm
from orchestrate.record import lock, run_dir
from orchestrate.record.paths import JobPaths
from orchestrate.record.slurm_job import Batch


@contextlib.contextmanager
def detaching(name: str) -> Iterator[None]:
    """Exit on Ctrl-C with a message that the job continues."""
    try:
        yield
    except KeyboardInterrupt:
        print_message(f"detached; {name} continues")
        raise SystemExit(errors.INTERRUPTED) from None


def check_started(paths: JobPaths) -> None:
    """Raise UsageError for a job that waits in the queue of a scheduler, and so has no workers."""
    if lock.is_queued(paths):
        name = paths.root.name
        raise UsageError(f"{name} waits in the queue", f"python -m orchestrate attach {name} shows when it starts")


def rounds(args: Args, paths: JobPaths) -> Iterator[bool]:
    """Yield once, or with `--follow` at intervals until the job has ended: whether there is another round."""
    while True:
        running = bool(args.follow) and run_dir.runs(paths)
        yield running
        if not running:
            return
        console.flush()
        args.clock.sleep(0.1)


def in_queue(job: Batch, clock: Clock) -> None:
    """Print why a job waits in the queue of a scheduler, whenever that changes, until it does not wait anymore."""
    shown = None
    console.phase("waiting in the queue")
    while (found := _state(job)).name in slurm.WAITING:
        if found != shown and found.reason != "None":  # it has just been submitted
            shown = found
            print_message(f"{job} is {found.name.lower()} ({found.reason}){_start(found)}")
            if found.reason in slurm.NEVER:
                print_message("warning: its partition may never run it: it asks for more than the partition has")
                print_message(
                    f"hint: python -m orchestrate stop {job.paths.root.name}; doctor --engine slurm shows what it has"
                )
        clock.sleep(slurm.KEPT)


def _start(found: slurm.State) -> str:
    """Say when a job is expected to start; Slurm puts a job behind one without a time limit off by a year."""
    with contextlib.suppress(ValueError):
        start = datetime.fromisoformat(found.start)
        if "Held" not in found.reason and start < datetime.now() + timedelta(days=300):
            return f"; expected to start at {found.start}"
    return ""


def _state(job: Batch) -> slurm.State:
    """Return the state of a job; as long as its controller does not answer, it may wait."""
    try:
        return slurm.state(job.id)
    except EngineError as error:
        return slurm.State("PENDING", str(error))
