"""`down`: the removal of a cluster."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from orchestrate import errors
from orchestrate.api import cluster, removal
from orchestrate.cli import options
from orchestrate.cli.args import Args
from orchestrate.cli.parser import Parser
from orchestrate.console import print_message
from orchestrate.engines import registry
from orchestrate.errors import UsageError
from orchestrate.host import owners, records
from orchestrate.record import lock, run_dir
from orchestrate.record.paths import JobPaths

if TYPE_CHECKING:
    from orchestrate.engines.base import Engine


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `down`."""
    parser.description = "Remove a cluster's nodes and files, but not the files of its jobs."
    parser.add_argument(
        "cluster",
        type=options.name,
        nargs="?",
        metavar="CLUSTER",
        help="name or unique prefix (default: the only one)",
    )
    options.add_dry_run(parser)
    options.add_runs(parser)


def run(args: Args) -> int:
    """Remove a cluster."""
    clusters, named = cluster.found(args.runs), args.cluster or ""
    exact = [each for each in clusters if each.name == named]
    matches = exact or [each for each in clusters if each.name.startswith(named)]
    if not named and len(matches) != 1:
        if not matches:
            raise UsageError(f"no clusters in {args.shown}")
        raise UsageError("no cluster given", f"name one of {', '.join(each.name for each in matches)}")
    there = JobPaths(args.runs / named)
    if not matches and there.root.is_dir() and not there.plan.exists() and records.find(there.root):
        return _remove_partial(args, there)
    if not matches and named:  # in another folder, by its whole name
        engines = registry.available_engines()
        matches = [each for engine in engines for each in cluster.elsewhere(engine, args.runs) if each.name == named]
    if not matches and (lost := _lost_nodes(named)):
        return _remove_lost(args, named, lost)
    if not matches:
        _refuse_foreign(named)
    if len(matches) != 1:
        known = ", ".join(each.name for each in matches or clusters)
        what = f"{named} matches {len(matches)} clusters" if matches else f"no such cluster: {named}"
        raise UsageError(what, f"clusters in {args.shown}: {known}" if known else f"no clusters in {args.shown}")
    chosen = matches[0]
    name, engine = chosen.name, registry.of_plan(chosen.spec, chosen.plan)
    resources = removal.resources([engine], name)
    for paths in [] if chosen.user() else chosen.jobs():
        if not (owners.foreign(paths.root) or run_dir.ended(paths) or lock.supervisor(paths)) and _is_intact(paths):
            hint = f"python -m orchestrate stop {paths.root.name} ends it, attach {paths.root.name} continues it"
            raise UsageError(f"{name} is in use by {paths.root.name}, which has no supervisor", hint)
    if args.dry_run:
        return removal.show(resources, f"folder {chosen.paths.root}")
    if user := chosen.user():
        job = chosen.busy_with()
        raise UsageError(f"{name} is in use by {user}", f"python -m orchestrate {f'stop {job}' if job else 'ps'}")
    cluster.take_down(engine, chosen, grace=30)
    print_message(f"{name} removed")
    return errors.SUCCEEDED


def _is_intact(paths: JobPaths) -> bool:
    """Whether another supervisor could continue a job."""
    try:
        run_dir.load(paths)
        run_dir.history(paths)
    except UsageError:
        return False
    return True


def _remove_partial(args: Args, paths: JobPaths) -> int:
    """Remove what is left of a cluster without nodes: `up` or `down` was killed."""
    if args.dry_run:
        return removal.show([], f"folder {paths.root}")
    with cluster.locked(paths):
        run_dir.remove(paths)
    print_message(f"{args.cluster} removed")
    return errors.SUCCEEDED


def _refuse_foreign(name: str) -> None:
    """Raise UsageError for the cluster of another account."""
    for engine in registry.available_engines():
        for state in engine.jobs():
            if state.job_id == name and state.cluster and state.owner != os.geteuid():
                raise UsageError(
                    f"{name} belongs to {owners.person(state.owner)}", owners.as_owner(state.paths.root, f"down {name}")
                )


def _lost_nodes(name: str) -> list[tuple[Engine, str]]:
    """Return the resources of a cluster whose files are gone or replaced, as when its project was moved or pulled."""
    engines = registry.available_engines()
    states = [state for engine in engines for state in engine.jobs() if state.job_id == name]
    roots = [state.paths.root for state in states if state.cluster and state.named]
    lost = any(not os.path.lexists(root) or records.replaced(root) for root in roots)
    return removal.resources(engines, name) if lost else []


def _remove_lost(args: Args, name: str, resources: list[tuple[Engine, str]]) -> int:
    if args.dry_run:
        return removal.show(resources)
    for engine in {id(engine): engine for engine, _ in resources}.values():
        engine.remove(name, grace=30)
    print_message(f"{name} removed; its files were already gone or replaced")
    return errors.SUCCEEDED
