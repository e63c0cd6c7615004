"""An engine's inventory and a job's placement, for plans in tests."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from orchestrate.plan.plan import Inventory, Placement, Plan
from orchestrate.plan.plan import plan as plan_
from orchestrate.spec.spec import JobSpec


class Site(NamedTuple):
    """The inventory and placement that an engine returns for a job."""

    inventory: Inventory
    placement: Placement

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inventory, name) if hasattr(self.inventory, name) else getattr(self.placement, name)

    def but(self, **changes: Any) -> Site:
        """A copy with changed fields, of either half."""
        of_inventory = {field.name for field in dataclasses.fields(Inventory)} & changes.keys()
        return Site(
            dataclasses.replace(self.inventory, **{name: changes[name] for name in of_inventory}),
            dataclasses.replace(self.placement, **{n: v for n, v in changes.items() if n not in of_inventory}),
        )


HERE = Site(
    Inventory(
        engine="docker",
        about="Docker Engine 26.1.5",
        cores=tuple(range(8)),
        gpus=(),
        no_gpus="the engine has no NVIDIA runtime",
    ),
    Placement(network="bridge", master_addr="", interface="eth0", job_dir="/job"),
)


def plan(spec: JobSpec, site: tuple[Inventory, Placement], job_id: str, port: int = 29500, **more: Any) -> Plan:
    return plan_(spec, *site, job_id, port, **more)


def with_gpus(count: int) -> Site:
    return HERE.but(gpus=tuple(f"GPU-{i}" for i in range(count)))


def spec(**more: Any) -> JobSpec:
    defaults: dict[str, Any] = {"image": "mine:1", "command": ("work.py",)}
    return JobSpec(**defaults | more)
