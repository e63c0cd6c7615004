"""`ps`: clusters and jobs."""

from __future__ import annotations

import json
from typing import Any

from orchestrate import console, errors
from orchestrate.cli import listing, options
from orchestrate.cli.args import Args
from orchestrate.cli.listing import Listed
from orchestrate.cli.parser import Parser
from orchestrate.console import out
from orchestrate.record.metrics import listed, strict

HEAD = ("NAME", "ENGINE", "NODES", "STATE")
MAX_METRICS = 3  # shown for a job


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `ps`."""
    parser.add_argument("-a", "--all", action="store_true", help="also list the jobs in --runs that have ended")
    parser.add_argument("--json", action="store_true", help="print a list of objects as JSON")
    options.add_runs(parser)


def run(args: Args) -> int:
    """List clusters and running jobs; with `--all`, also the jobs that have ended."""
    rows = [*listing.current(args.runs), *listing.queued()]
    if args.all:
        running = {row.name for row in rows}
        rows += [row for row in listing.ended(args.runs) if row.name not in running]
    if args.json:
        out(json.dumps([_data(row) for row in rows], indent=2))
    elif args.all:
        elsewhere = any(row.run and row.run.parent != args.runs for row in rows)  # otherwise, the name says it
        columns = ("STARTED", "DURATION", *["RUN"] * elsewhere, "METRICS")
        console.table([(*HEAD, *columns), *(_long(row, elsewhere) for row in rows)], cut=True)
    else:
        console.table([(*HEAD, "RUN"), *((*_short(row), _run(row)) for row in rows)])
    return errors.SUCCEEDED


def _short(row: Listed) -> tuple[str, str, str, str]:
    return row.name, row.engine, str(row.nodes) if row.run and row.seconds is None else "", row.state


def _long(row: Listed, elsewhere: bool) -> tuple[str, ...]:
    metrics = ", ".join(listed(row.metrics)[:MAX_METRICS])
    lasted = "" if row.seconds is None else listing.duration(row.seconds)
    started = listing.ago(row.started) if row.started else ""
    return *_short(row), started, lasted, *[_run(row)] * elsewhere, metrics


def _run(row: Listed) -> str:
    return str(row.run) if row.run else ""


def _data(row: Listed) -> dict[str, Any]:
    return {
        "name": row.name,
        "engine": row.engine,
        "nodes": row.nodes,
        "state": row.state,
        "run_directory": _run(row),
        "started": row.started,
        "duration_s": row.seconds,
        "metrics": strict(row.metrics),
    }
