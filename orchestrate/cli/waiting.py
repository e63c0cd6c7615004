"""Waiting for a job that another process supervises."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from typing import NoReturn

from orchestrate import console, errors
from orchestrate.console import print_message
from orchestrate.errors import OrchestrateError
from orchestrate.record import lock, run_dir
from orchestrate.record.paths import JobPaths


@contextlib.contextmanager
def detaching(name: str) -> Iterator[None]:
    """Exit on Ctrl-C with a message that the job continues."""
    try:
        yield
    except KeyboardInterrupt:
        print_message(f"detached; {name} is still running")
        raise SystemExit(errors.INTERRUPTED) from None


def rounds(args: argparse.Namespace, paths: JobPaths) -> Iterator[bool]:
    """Yield once, or with `--follow` at intervals until the job has ended: whether there is another round."""
    while True:
        running = bool(args.follow and not run_dir.ended(paths) and lock.holder(paths))
        yield running
        if not running:
            return
        console.flush()
        args.clock.sleep(0.1)


def unsupervised(paths: JobPaths) -> NoReturn:
    """Raise OrchestrateError for a job without a supervisor, since no result will be reported."""
    name = paths.root.name
    raise OrchestrateError(
        f"{name} has no supervisor, so no result will be reported", f"python -m orchestrate attach {name}"
    )
