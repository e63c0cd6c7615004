"""`up`: nodes that stay up for later jobs."""

from __future__ import annotations

from orchestrate import errors
from orchestrate.api import cluster
from orchestrate.cli import options, request, signals
from orchestrate.cli.args import Args
from orchestrate.cli.parser import Parser
from orchestrate.console import out, print_message
from orchestrate.engines import registry
from orchestrate.plan.plan import pluralize


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `up`."""
    options.add_job_options(parser)
    options.add_runs(parser)


def run(args: Args) -> int:
    """Start a cluster, and return once its nodes have imported what jobs need."""
    signals.interruptible()
    spec, runs = request.spec_of(args), args.runs
    created, warm = cluster.start(registry.select_engine(spec), spec, runs)
    if not warm:
        packages = ", ".join(created.plan.placement.packages)
        print_message(f"the nodes are still importing {packages}; the first job waits for them")
    nodes = len(created.plan.nodes)
    verb = "is" if nodes == 1 else "are"
    print_message(f"{pluralize(nodes, 'node')} {verb} up for jobs started in {created.plan.placement.code}")
    for other in cluster.found(runs):
        if other.name != created.name and other.plan.placement.code == created.plan.placement.code:
            print_message(f"note: {other.name} is also up")
    print_message(f"hint: python -m orchestrate run uses them; python -m orchestrate down {created.name} removes them")
    out(created.name)
    return errors.SUCCEEDED
