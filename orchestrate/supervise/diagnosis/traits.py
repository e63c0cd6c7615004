"""What a job's script does by itself although the job does it, by a look at its source."""

from __future__ import annotations

from collections.abc import Mapping

from orchestrate.files import sandbox
from orchestrate.plan import imports
from orchestrate.plan.plan import Plan
from orchestrate.plan.preload import MAX_CPU_SECONDS

GROUP = "call torch.distributed.init_process_group() and train a DistributedDataParallel model"


def of(plan: Plan) -> dict[str, str]:
    """Return the traits of a job's script, by the names in `imports.TRAITS`, each with FILE:LINE where it was found."""
    arguments = plan.command, str(plan.placement.start)
    return sandbox.call(imports.traits, *arguments, seconds=MAX_CPU_SECONDS) or {}


def own_world(plan: Plan) -> str:
    """Return what a script does where it may create a world of its own; empty if it has no such place."""
    return _own_world(of(plan))


def _own_world(found: Mapping[str, str]) -> str:
    if place := found.get("spawn"):
        return f"see whether this run called mp.spawn() at {place}: the job starts the workers, and sets RANK"
    if place := found.get("address"):
        return f"see whether this run set its own address of rank 0 at {place}: leave it to the job (MASTER_ADDR)"
    return ""


def together(plan: Plan) -> str:
    """Return how the workers of a script train together that have exchanged no data."""
    found = of(plan)
    if own := _own_world(found):
        return own
    if "group" in found and "parallel" in found:
        return (
            f"init_process_group() is at {found['group']}, DistributedDataParallel at {found['parallel']}: see why "
            "this run did not use them"
        )
    if "group" in found:
        return f"after init_process_group() at {found['group']}, train a DistributedDataParallel model"
    return GROUP


def shared_file(plan: Plan) -> str:
    """Return where a script meets other workers at a file that each node has for itself; empty if it does not."""
    place = of(plan).get("file", "") if plan.contained else ""
    return f"workers meet at a file ({place}), which each node has for itself: use env://" if place else ""
