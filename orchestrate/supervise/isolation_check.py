"""Whether the workers of a job train together: whether they exchange data, and use the GPUs that they were given.

A framework that does not recognise a job trains one model per worker, and succeeds.
"""

from __future__ import annotations

from collections.abc import Mapping

from orchestrate.plan.plan import Plan
from orchestrate.plan.preload import uses
from orchestrate.record import events
from orchestrate.record.outcomes import Use
from orchestrate.supervise.context import JobContext
from orchestrate.supervise.diagnosis import traits

CHECK_AFTER = 60.0  # seconds of training after which workers are checked while they run
LOOK_INTERVAL = 10.0  # seconds between two looks whether training has begun
# Bytes per worker of the job that a worker exchanges at most to create process groups, and for nothing else; with gloo
# and 2 to 16 workers it was 380 to 440, and a barrier takes 110 to 145 more.
SETUP_BYTES = 512
# Seconds for which workers must have been sampled, and connected, for a verdict: of what a group exchanges shortly
# before its end, the last samples see nothing on a busy machine.
MIN_SAMPLED, MIN_CONNECTED = 2.0, 3.0
_LIGHTNING = (
    "do not set `devices` and `num_nodes` of the Trainer, or give a script's own options for them '$LOCAL_WORLD_SIZE' "
    "and '$GROUP_WORLD_SIZE'; for LightningCLI, add --trainer.num_nodes '$GROUP_WORLD_SIZE' --trainer.devices "
    "'$LOCAL_WORLD_SIZE'; with Fabric, use fabric.setup()"
)
HINTS = {  # by package, the first that a script imports
    "lightning": _LIGHTNING,
    "pytorch_lightning": _LIGHTNING,
    "transformers": "use a Trainer or an Accelerator; on the CPU, leave ACCELERATE_USE_CPU to the job",
    "accelerate": "pass model, optimizer and data loaders to Accelerator.prepare(); on the CPU, leave "
    "ACCELERATE_USE_CPU to the job",
    "deepspeed": "call deepspeed.initialize() and train with the engine that it returns",
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

    def __init__(self, job: JobContext, plan: Plan) -> None:
        self.job, self.plan = job, plan
        self.uses: dict[int, Use] = {}  # by rank, of workers that have ended
        self.due = self.job.clock.monotonic() + LOOK_INTERVAL
        self.begun = float("inf")  # time when training was first seen

    def ended(self, rank: int, use: Use | None) -> None:
        """Note what a worker has used until its end."""
        if use:
            self.uses[rank] = use

    def step(self) -> None:
        """Once all workers have trained for a minute, check them and emit warnings; raises EngineError."""
        now = self.job.clock.monotonic()
        if now < self.due:
            return
        running = self.job.session.activity().items()
        known = self.uses | {rank: activity.use for rank, activity in running if activity.use}
        if self.begun > now and not self._have_begun(known):
            self.due = now + LOOK_INTERVAL
            return
        self.begun = min(self.begun, now)
        # Some may have started later, because their nodes imported modules.
        sampled = min((use.sampled for use in known.values()), default=CHECK_AFTER)
        left = CHECK_AFTER - min(sampled, now - self.begun)
        if left > 0:
            self.due = now + left
            return
        self.due = float("inf")
        past = [type(event) for event in self.job.emit.events]
        if self._isolated(known) and events.WorkersIsolated not in past:
            self.job.emit(events.WorkersIsolated(self.plan.world_size, self._hint(known)))
        idle = [rank for rank, use in sorted(known.items()) if self.plan.gpus and not use.gpu]
        if idle and events.GpusUnused not in past:
            self.job.emit(events.GpusUnused(tuple(idle)))

    def _have_begun(self, known: Mapping[int, Use]) -> bool:
        """Whether training was seen: a process group, with which workers are connected, or printed progress."""
        group = any(use.connected >= MIN_CONNECTED for rank, use in known.items() if rank)
        return group or self.job.files.has_progress()

    def versions(self) -> tuple[str, ...]:
        """Return the versions of torch that the workers have loaded, as far as is known: usually one."""
        return tuple(sorted({use.version for use in self.uses.values() if use.version}))

    def advice(self) -> str:
        """If the workers that have ended exchanged no data, how to change that; otherwise empty."""
        return self._hint(self.uses) if self._isolated(self.uses) else ""

    def missing(self) -> str:
        """Why it is not certain that the workers that have ended communicated; empty if it is, or there is only one."""
        others = range(1, self.plan.world_size)
        if self._isolated(self.uses):
            return "the workers exchanged no data (require_communication)"
        communicating = any(rank in self.uses and self.uses[rank].exchanged for rank in others)
        if others and not (communicating and self.uses.keys() >= {*others}):
            return "it is unknown whether the workers exchanged data (require_communication)"
        return ""

    def _hint(self, known: Mapping[int, Use]) -> str:
        """How workers of the script train together, by the launcher that it runs or the framework that it imports."""
        if launcher := next((use.launcher for use in known.values() if use.launcher), ""):
            return f"{launcher} starts workers of its own on each node: run its script as the job's, without {launcher}"
        found = uses(self.plan.command, self.plan.placement.start)
        framework = next((text for name, text in HINTS.items() if name in found), "")
        return framework or traits.together(self.plan)

    def _isolated(self, known: Mapping[int, Use]) -> bool:
        """Whether the workers use torch and exchange no data, as far as is known."""
        placement, values = self.plan.placement, known.values()
        # NCCL uses NVLink, shared memory or RDMA, and other libraries shared memory, where the kernel counts no bytes.
        by_kernel = not self.plan.gpus and not any(use.gpu for use in values) and self.plan.nproc_per_node == 1
        several_networks = self.plan.engine == "swarm" and placement.network == "host"
        isolated = are_isolated(known, self.plan.world_size, by_kernel)
        return isolated is True and any(use.torch for use in values) and not several_networks
