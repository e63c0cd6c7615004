"""`up`: nodes that stay up for later jobs."""

from __future__ import annotations

import argparse
import dataclasses

from orchestrate import errors
from orchestrate.api import cluster
from orchestrate.cli import options, request
from orchestrate.cli.parser import Parser
from orchestrate.console import out, phase, print_message
from orchestrate.engines import choice
from orchestrate.plan.plan import pluralize
from orchestrate.supervise import stores

IMPORT_TIMEOUT = 120.0  # seconds for the nodes of a cluster to import packages; torch takes 2 to 20


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `up`."""
    options.add_job_options(parser)
    options.add_runs(parser)


def run(args: argparse.Namespace) -> int:
    """Start a cluster, and return once its nodes have imported what jobs need."""
    spec, runs = request.spec_of(args), args.runs
    name, engine = spec.name or "cluster", choice.select_engine(spec)
    stores.prepare(spec)
    phase(f"starting {pluralize(spec.trainers + 1 + spec.spares, 'node')}")
    created, session = cluster.bring_up(engine, dataclasses.replace(spec, name=name), runs)
    nodes = len(created.plan.nodes)
    if packages := ", ".join(created.plan.placement.packages):
        phase(f"importing {packages} in {pluralize(nodes, 'node')}")
        try:
            if not session.wait_until_warm(created.plan.nodes, IMPORT_TIMEOUT):
                print_message(f"the nodes are still importing {packages}; the first job waits for them")
        except BaseException:  # Ctrl-C
            cluster.take_down(engine, created, 0)
            raise
        phase("")
    verb = "is" if nodes == 1 else "are"
    print_message(f"{pluralize(nodes, 'node')} {verb} up for jobs started in {created.plan.placement.code}")
    for other in cluster.found(runs):
        if other.name != created.name and other.plan.placement.code == created.plan.placement.code:
            print_message(f"note: {other.name} is also up")
    print_message(f"hint: python -m orchestrate run uses them; python -m orchestrate down {created.name} removes them")
    out(created.name)
    return errors.SUCCEEDED
