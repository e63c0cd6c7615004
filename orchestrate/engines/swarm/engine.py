"""Docker Swarm: nodes on the hosts that the user's `docker` command manages."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from pathlib import Path

from orchestrate.engines.base import JobState, Local
from orchestrate.engines.docker.image import ensure_image
from orchestrate.engines.docker.mounts import check_link
from orchestrate.engines.swarm import service_spec
from orchestrate.engines.swarm.manager import Manager, gpus, total_gpus
from orchestrate.engines.swarm.session import SwarmSession
from orchestrate.engines.swarm.upload import code_files
from orchestrate.errors import UsageError
from orchestrate.files.paths import code_folder
from orchestrate.host import writable
from orchestrate.plan.plan import Inventory, Placement, Plan, WorkerPlan, pluralize
from orchestrate.plan.preload import preload
from orchestrate.spec.spec import IMAGE, JobSpec


class SwarmEngine:
    """The Swarm of one manager."""

    name = "swarm"

    def __init__(self) -> None:
        """Connect; raises EngineError if no Swarm manager is available."""
        self.manager = Manager()

    def prepare(self, spec: JobSpec, run: Path) -> None:
        """Build or pull the images of the nodes and of the relay."""
        if spec.volume.startswith("/") and Path(spec.volume).is_dir():  # of this host, too
            writable.note([writable.resolved(spec.volume)])
        ensure_image(self.manager.daemon, spec)
        if spec.image != IMAGE:
            ensure_image(self.manager.daemon, JobSpec())

    def inventory(self, spec: JobSpec, run: Path, run_image: bool) -> tuple[Inventory, Placement]:
        """Count hosts, cores and GPUs; raises ResourceError if something is missing."""
        code = code_folder(spec.command)
        check_link(spec.command[0], code / spec.chdir)
        code_files(code, run.parent.parent)  # raises ResourceError if they are too large
        hosts = self.manager.candidate_hosts(spec)
        nodes = spec.trainers + 1
        resources = [host["Description"]["Resources"] for host in hosts]
        smallest = min(one.get("NanoCPUs", 0) for one in resources) // service_spec.NANOSECONDS
        most = math.ceil(nodes / len(hosts))  # maximum number of nodes on one host
        offered = [gpus(host) for host in hosts] if spec.gpus != "none" else []
        inventory = Inventory(
            engine="swarm",
            about=f"Docker Swarm {self.manager.info['ServerVersion']} of {pluralize(len(hosts), 'host')}, "
            f"image {spec.image}",
            cores=tuple(range(max(1, smallest * nodes // most))),
            gpus=(service_spec.GPU,) * total_gpus(offered, nodes, spec.spares),
            no_gpus=f"no host of the Swarm offers the generic resource {service_spec.GPU}",
            memory=min(one.get("MemoryBytes", 0) for one in resources),
            hosts=len(hosts),
        )
        placement = Placement(
            network=spec.network,
            master_addr="",
            interface="",  # each node finds its interface to the master
            job_dir=f"{service_spec.SHARED}/{run.parent.name}" if spec.volume else service_spec.JOB,
            code=str(code),
            sent=not spec.volume,  # in a job folder that all nodes share, they would overwrite each other's code
            preload=preload(spec, code, copied=not spec.volume),
        )
        return inventory, placement

    def hidden(self, plan: Plan, run: Path) -> Collection[str]:
        """Return no paths: workers do not run in a copy of the code folder."""
        return ()

    def open(self, spec: JobSpec, plan: Plan, run: Path, warn: Callable[[str], None]) -> SwarmSession:
        """Open the session of a job; raises EngineError if it has no key."""
        return SwarmSession(self.manager, spec, plan, run, warn)

    def inside(self, spec: JobSpec, plan: Plan, run: Path, worker: WorkerPlan, terminal: bool) -> Local:
        """Raise UsageError: an engine runs commands only in its own containers."""
        raise UsageError("commands cannot run in nodes of a Swarm", f"docker exec, on the host of {worker.node}")

    def jobs(self) -> list[JobState]:
        """List the jobs that have services here."""
        return self.manager.jobs()

    def resources(self, job_id: str) -> list[str]:
        """Describe the services, relay, network and secret of a job."""
        return [f"{kind} {name}" for kind, name, _ in self.manager.objects(job_id)]

    def remove(self, job_id: str, grace: float) -> None:
        """Remove everything with the job's label, and wait until Swarm has released it."""
        self.manager.remove(job_id, grace)
