"""Slurm: the machines of its cluster, which share the folder of the job."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Callable, Collection
from pathlib import Path

from orchestrate.clock import SYSTEM, Clock
from orchestrate.engines import process, venv
from orchestrate.engines.base import JobState, Local, ignoring
from orchestrate.engines.docker import mounts
from orchestrate.engines.slurm import addresses, image
from orchestrate.engines.slurm.session import SlurmSession
from orchestrate.errors import EngineError, UsageError
from orchestrate.files.paths import code_folder
from orchestrate.host import slurm
from orchestrate.node.warm import SUPPORTED
from orchestrate.plan.plan import Inventory, Placement, Plan, WorkerPlan
from orchestrate.plan.preload import preload
from orchestrate.record import slurm_job
from orchestrate.record.paths import JobPaths
from orchestrate.spec.folders import data_folders
from orchestrate.spec.spec import IMAGE, JobSpec

GPU = "gpu"  # any of them: only Slurm knows which ones a job gets
UNSUPPORTED = tuple(name for name in process.UNSUPPORTED if name not in ("memory", "cpus", "image"))
COMMENT = "orchestrate:"  # before the run directory, in the comment of our jobs


class SlurmEngine:
    """The cluster whose commands this machine has."""

    name = "slurm"

    def __init__(self, clock: Clock = SYSTEM) -> None:
        """Raise ResourceError if the commands are missing."""
        self.version, self.clock = slurm.call("sbatch", "--version").split()[-1], clock
        self.evicted = False  # whether Slurm ends the allocation that this process runs in

    def prepare(self, spec: JobSpec, run: Path) -> None:
        """Install the job's packages in a virtual environment, which all machines must see."""
        if spec.pip:
            venv.create(spec.pip)

    def inventory(self, spec: JobSpec, run: Path, run_image: bool) -> tuple[Inventory, Placement]:
        """Return what the job asks Slurm for; raises UsageError for settings that Slurm does not support."""
        if spec.pin or spec.share_gpus or spec.virtual_local_rank or spec.queue or spec.keep:
            why = "Slurm does not support pin, share_gpus, virtual_local_rank, queue and keep"
            raise UsageError(why, "remove them; jobs wait in Slurm's own queue")
        if spec.image != IMAGE and spec.pip:
            raise UsageError("on Slurm, packages of pip cannot be added to an image", "use an image that has them")
        about = ignoring(spec, UNSUPPORTED, "Slurm")
        if image.before(spec, JobPaths(run.parent), str(run)):  # raises for what it cannot run
            about += f", image {spec.image}"
        nodes = spec.trainers + 1
        code = code_folder(spec.command)
        where = f", partition {spec.slurm['partition']}" if "partition" in spec.slurm else ""
        inventory = Inventory(
            engine="slurm",
            about=f"Slurm {self.version}{where}{about}",
            cores=tuple(range(nodes * cpus(spec))),
            gpus=(GPU,) * gpus(spec),
            no_gpus="--gpus N asks for some",
            hosts=nodes,
        )
        placement = Placement(
            network="",
            master_addr="",
            interface="",  # each node finds its interface to the master
            job_dir=str(run),
            code=str(code),
            sent=True,
            data=data_folders(spec),
            python=_python(spec),
            preload=preload(spec, code, copied=True) if SUPPORTED else (),
        )
        return inventory, placement

    def hidden(self, plan: Plan, run: Path) -> Collection[str]:
        """Return the paths in the code folder that are not copied."""
        return mounts.hidden(Path(plan.placement.code), run.parent.parent, plan.placement.chdir)

    def open(self, spec: JobSpec, plan: Plan, run: Path, warn: Callable[[str], None]) -> SlurmSession:
        """Open the session of a job; raises EngineError if it has no key."""
        return SlurmSession(spec, plan, run, warn, self._evict, self.clock)

    def _evict(self) -> None:
        self.evicted = True

    def inside(self, spec: JobSpec, plan: Plan, run: Path, worker: WorkerPlan, terminal: bool) -> Local:
        """Return a step of the job on the machine of a worker."""
        paths = JobPaths(run.parent)
        found, address = slurm_job.of(paths), addresses.read(paths.addresses, worker.node)
        if not found or not address:
            raise UsageError(f"{worker.node} does not run", f"python -m orchestrate attach {plan.job_id}")
        cwd = plan.placement.cwd(plan.placement.code)
        words = ["srun", f"--jobid={found.id}", "--overlap", "--nodes=1", "--ntasks=1"]
        words += [f"--nodelist={address.host}", "--mem=0", f"--chdir={cwd}", "--quiet", *["--pty"] * terminal]
        return Local([*words, *image.before(spec, paths, cwd)], os.environ | worker.env)

    def jobs(self) -> list[JobState]:
        """List the jobs in the queue that this account has submitted."""
        found = []
        with contextlib.suppress(EngineError):
            for line in slurm.call("squeue", "--me", "--noheader", "--format", "%D|%k").splitlines():
                nodes, _, comment = line.partition("|")
                if comment.startswith(COMMENT) and nodes.isdigit():
                    paths = JobPaths(Path(comment.removeprefix(COMMENT)))
                    found.append(JobState(paths.root.name, "slurm", int(nodes), paths.shared, os.getuid()))
        return found

    def resources(self, job_id: str) -> list[str]:
        """Describe the job in the queue."""
        return [str(found) for found in self._submitted(job_id)]

    def remove(self, job_id: str, grace: float) -> None:
        """Cancel the job in the queue."""
        for found in self._submitted(job_id):
            if not slurm.is_inside(found.id):
                slurm.call("scancel", found.id)

    def _submitted(self, job_id: str) -> list[slurm_job.Batch]:
        runs = [state.paths for state in self.jobs() if state.job_id == job_id]
        return [found for paths in runs if (found := slurm_job.of(paths))]


def _python(spec: JobSpec) -> str:
    if spec.image != IMAGE:
        return "python"
    return str(venv.python(spec.pip)) if spec.pip else sys.executable


def cpus(spec: JobSpec) -> int:
    """Return the number of cores that each node asks for: by default, one for each worker."""
    of_gpus = spec.gpus // (spec.trainers + 1) if isinstance(spec.gpus, int) else 0
    return math.ceil(spec.cpus or spec.nproc_per_node or of_gpus or 1)


def gpus(spec: JobSpec) -> int:
    """Return the number of GPUs that all nodes ask for."""
    if isinstance(spec.gpus, int):
        return spec.gpus
    return (spec.trainers + 1) * (spec.nproc_per_node or 1) if spec.gpus == "all" else 0
