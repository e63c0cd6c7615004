"""Whether the workers of a job train together: whether they exchange data, and use the GPUs that they were given.

A framework that does not recognise a job trains one model per worker, and succeeds.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

from orchestrate.job import events
from orchestrate.job.outcomes import Use
from orchestrate.job.plan import Plan
from orchestrate.job.preload import uses
from orchestrate.supervise.running import Running

CHECK_AFTER = 60.0  # seconds that all workers have run when they are checked while they run
# Bytes per worker of the job that a worker exchanges at most to create process groups, and for nothing else; with gloo
# and 2 to 16 workers it was 420 to 440.
SETUP_BYTES = 1024
MIN_SAMPLED = 2.0  # seconds for which workers must have been sampled, and connected, for a verdict
MIN_CONNECTED = 1.0
_LIGHTNING = (
    "do not set `devices` and `num_nodes` of the Trainer; for LightningCLI, add --trainer.num_nodes "
    "'$GROUP_WORLD_SIZE' --trainer.devices '$LOCAL_WORLD_SIZE'; with Fabric, use fabric.setup()"
)
HINTS = {  # by package, the first that a script imports
    "lightning": _LIGHTNING,
    "pytorch_lightning": _LIGHTNING,
    "transformers": "use a Trainer or an Accelerator; on the CPU, leave ACCELERATE_USE_CPU to the job",
    "accelerate": "pass model, optimizer and data loaders to Accelerator.prepare(); on the CPU, leave "
    "ACCELERATE_USE_CPU to the job",
    "deepspeed": "call deepspeed.initialize() and train with the engine that it returns",
    "torch": "call torch.distributed.init_process_group() and train a DistributedDataParallel model",
}


def are_isolated(uses: Mapping[int, Use], world_size: int, by_kernel: bool) -> bool | None:
    """Whether workers exchange no data, from what each has used so far; None if that is unknown.

    Rank 0 does not count: it may host the store, with which all others are connected. Unless `by_kernel`, so that all
    data would pass through connections of the kernel, one connection is enough.
    """
    others = [uses[rank] for rank in range(1, world_size) if rank in uses]
    if len(others) < world_size - 1 or not others:
        return None
    if any(use.exchanged >= (SETUP_BYTES * world_size if by_kernel else 1) for use in others):
        return False
    if any(use.sampled < MIN_SAMPLED or 0 < use.connected < MIN_CONNECTED for use in others):
        return None
    return True


class WorldCheck:
    """Checks the workers of one generation once while they run, and at their end."""

    def __init__(self, job: Running, plan: Plan) -> None:
        self.job, self.plan = job, plan
        self.uses: dict[int, Use] = {}  # by rank, of workers that have ended
        self.due = self.job.clock.monotonic() + CHECK_AFTER

    def ended(self, rank: int, use: Use | None) -> None:
        """Note what a worker has used until its end."""
        if use:
            self.uses[rank] = use

    def step(self) -> None:
        """Once all workers have run for a minute, check them and emit warnings; raises EngineError."""
        if self.job.clock.monotonic() < self.due:
            return
        running = self.job.session.activity().items()
        known = self.uses | {rank: activity.use for rank, activity in running if activity.use}
        left = CHECK_AFTER - min((use.sampled for use in known.values()), default=0.0)
        if known and left > 0:  # some have started later, because their nodes imported modules
            self.due = self.job.clock.monotonic() + left
            return
        self.due = float("inf")
        past = [type(event) for event in self.job.emit.events]
        if self._isolated(known) and events.WorkersIsolated not in past:
            self.job.emit(events.WorkersIsolated(self.plan.world_size, self.hint))
        idle = [rank for rank, use in sorted(known.items()) if self.plan.gpus and not use.gpu]
        if idle and events.GpusUnused not in past:
            self.job.emit(events.GpusUnused(tuple(idle)))

    def versions(self) -> tuple[str, ...]:
        """Return the versions of torch that the workers have loaded, as far as is known: usually one."""
        return tuple(sorted({use.version for use in self.uses.values() if use.version}))

    def advice(self) -> str:
        """If the workers that have ended exchanged no data, how to change that; otherwise empty."""
        return self.hint if self._isolated(self.uses) else ""

    def missing(self) -> str:
        """Why it is not certain that the workers that have ended communicated; empty if it is, or there is only one."""
        others = range(1, self.plan.world_size)
        if self._isolated(self.uses):
            return "the workers exchanged no data (require_communication)"
        communicating = any(rank in self.uses and self.uses[rank].exchanged for rank in others)
        if others and not (communicating and self.uses.keys() >= {*others}):
            return "it is unknown whether the workers exchanged data (require_communication)"
        return ""

    @cached_property
    def hint(self) -> str:
        """How workers of the script train together, by the framework that it imports."""
        found = uses(self.plan.command, Path(self.plan.placement.code))
        return next((text for name, text in HINTS.items() if name in found), HINTS["torch"])

    def _isolated(self, known: Mapping[int, Use]) -> bool:
        """Whether the workers use torch and exchange no data, as far as is known."""
        placement, values = self.plan.placement, known.values()
        # NCCL uses NVLink, shared memory or RDMA, and other libraries shared memory, where the kernel counts no bytes.
        by_kernel = not self.plan.gpus and not any(use.gpu for use in values) and self.plan.nproc_per_node == 1
        several_networks = self.plan.engine == "swarm" and placement.network == "host"
        isolated = are_isolated(known, self.plan.world_size, by_kernel)
        return isolated is True and any(use.torch for use in values) and not several_networks
