"""Selection of an engine. Engines are imported on demand: Docker's SDK may be missing."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

from orchestrate.console import print_message
from orchestrate.engines.swarm import unsupported
from orchestrate.errors import EngineLost, OrchestrateError, ResourceError
from orchestrate.host import slurm
from orchestrate.plan.plan import Plan
from orchestrate.spec.spec import JobSpec

if TYPE_CHECKING:
    from orchestrate.engines.base import Engine, JobState

log = logging.getLogger(__name__)


def select_engine(spec: JobSpec) -> Engine:
    """Return the engine of a job; `auto` falls back to local processes without Docker Engine and Compose.

    If Docker is running but unusable, for example over TLS, that is an error: a job meant for a container would run
    with all rights of its user. Raises UsageError for settings that a Swarm does not support.
    """
    if spec.engine == "swarm":
        unsupported.check(spec)
        return _swarm()
    if spec.engine == "slurm":
        return _slurm()
    if spec.engine != "process":
        try:
            return _docker()
        except (EngineLost, ResourceError) as error:  # ResourceError: Compose is missing, so no job can have run there
            if spec.engine == "docker":
                raise
            log.debug("falling back to local processes", exc_info=True)
            fix = "Start Docker" if isinstance(error, EngineLost) else f"{error.hint[0].upper()}{error.hint[1:]}"
            if error.hint.startswith("sudo"):
                fix = f"Get access to its socket ({error.hint.partition(';')[0]})"
            fix += " to use containers, or set --engine process"
            print_message(f"{error}; running as local processes, without isolation. {fix}.")
        except OrchestrateError as error:
            if spec.engine == "auto":
                error.hint += "; --engine process runs the job without containers"
            raise
    from orchestrate.engines.process import ProcessEngine

    return ProcessEngine()


def of_plan(spec: JobSpec, plan: Plan) -> Engine:
    """Return the engine in a job's plan; its spec may be `auto`."""
    return select_engine(dataclasses.replace(spec, engine=plan.engine))


def _docker() -> Engine:
    from orchestrate.engines.docker.engine import DockerEngine

    return DockerEngine()


def _swarm() -> Engine:
    from orchestrate.engines.swarm.engine import SwarmEngine

    return SwarmEngine()


def _slurm() -> Engine:
    from orchestrate.engines.slurm.engine import SlurmEngine

    return SlurmEngine()


def jobs() -> Iterator[JobState]:
    """Yield the jobs of all engines that are available."""
    from orchestrate.engines.docker import listing
    from orchestrate.engines.process import ProcessEngine

    yield from listing.jobs()
    with contextlib.suppress(OrchestrateError):
        yield from _slurm().jobs() if slurm.installed() else ()
    yield from ProcessEngine().jobs()


def memory(job: JobState) -> int:
    """Return the bytes of memory that the nodes of a job hold; 0 if unknown, as on other machines."""
    from orchestrate.engines.docker import listing
    from orchestrate.engines.process import ProcessEngine

    measure = {"docker": listing.memory, "process": ProcessEngine().memory}.get(job.engine)
    return measure(job.job_id) if measure else 0


def available_engines() -> list[Engine]:
    """Return all engines that are available."""
    from orchestrate.engines.process import ProcessEngine

    engines: list[Engine] = [ProcessEngine()]
    for connect in (*([_slurm] if slurm.installed() else []), _swarm, _docker):
        with contextlib.suppress(OrchestrateError):
            engines.insert(0, connect())
    return engines
