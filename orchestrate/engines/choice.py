"""Which engines there are. Each is imported when it is needed: Docker's SDK may be missing."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from orchestrate.console import say
from orchestrate.errors import EngineLost, OrchestrateError, ResourceError
from orchestrate.job.spec import JobSpec

if TYPE_CHECKING:
    from orchestrate.engines.base import Engine

log = logging.getLogger(__name__)


def engine_of(spec: JobSpec) -> Engine:
    """The engine that the job asks for; for `auto` local processes where no Docker Engine with Compose answers.

    One that is chosen and cannot be used, as over TLS, is an error: a job that ran in containers would run with all
    that its user can do.
    """
    if spec.engine == "swarm":
        return _swarm()
    if spec.engine != "process":
        try:
            return _docker()
        except (EngineLost, ResourceError) as error:  # ResourceError: without Compose no job has run there
            if spec.engine == "docker":
                raise
            log.debug("local processes instead of Docker", exc_info=True)
            cure = "Start Docker" if isinstance(error, EngineLost) else f"{error.hint[0].upper()}{error.hint[1:]}"
            say(f"{error}; running as local processes, without isolation. {cure} to use containers.")
        except OrchestrateError as error:
            if spec.engine == "auto":
                error.hint += "; --engine process runs the job without containers"
            raise
    from orchestrate.engines.process import ProcessEngine

    return ProcessEngine()


@contextlib.contextmanager
def sdk() -> Iterator[None]:
    """Import modules that need Docker's SDK, which takes half a second; raises ResourceError if it is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in ("docker", "requests"):
            raise
        hint = f"install it ({sys.executable} -m pip install docker)"
        raise ResourceError(f"the Python package {error.name} is missing", hint) from None


def _docker() -> Engine:
    with sdk():
        from orchestrate.engines.docker.engine import DockerEngine
    return DockerEngine()


def _swarm() -> Engine:
    with sdk():
        from orchestrate.engines.swarm.engine import SwarmEngine
    return SwarmEngine()


def answering() -> list[Engine]:
    """All engines that answer."""
    from orchestrate.engines.process import ProcessEngine

    found: list[Engine] = [ProcessEngine()]
    for make in (_swarm, _docker):
        with contextlib.suppress(OrchestrateError):
            found.insert(0, make())
    return found
