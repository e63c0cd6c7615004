"""What an engine has, for plans in tests."""

import dataclasses

from orchestrate.job.plan import Inventory
from orchestrate.job.plan import plan as plan_

HERE = Inventory(
    engine="docker",
    about="Docker Engine 26.1.5",
    cores=tuple(range(8)),
    gpus=(),
    no_gpus="the engine has no NVIDIA runtime",
    network="bridge",
    master_addr="",
    interface="eth0",
    job_dir="/job",
)


def plan(spec, inventory, job_id, **more):
    return plan_(spec, inventory, job_id, 29500, **more)


def with_gpus(count: int) -> Inventory:
    return dataclasses.replace(HERE, gpus=tuple(f"GPU-{i}" for i in range(count)))
