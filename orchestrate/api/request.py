"""The job that is asked for, in layers of job file keys: checked, and complete without the files that it names."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orchestrate.api import defaults
from orchestrate.api.check_script import check_script
from orchestrate.errors import UsageError
from orchestrate.host import slurm
from orchestrate.spec import folders, requirements, secret_files, source
from orchestrate.spec.layers import resolve
from orchestrate.spec.redact import HIDDEN
from orchestrate.spec.spec import JobSpec, unencodable


def spec_of(*layers: Mapping[str, Any]) -> JobSpec:
    """Return the spec of the job that the user's defaults and these layers describe, later ones taking precedence.

    Makes the job's `source`, if it has one, the current folder. Raises UsageError, and ResourceError without it.
    """
    usual = defaults.layer()
    spec = resolve(usual, *layers)
    own = {key for layer in layers for key in layer}
    general = [key for key in defaults.OF_ENGINES if key in usual and key not in own]
    engine = "slurm" if spec.engine == "auto" and spec.slurm and slurm.installed() else spec.engine
    spec = dataclasses.replace(spec, optional=[*dict.fromkeys([*spec.optional, *general])], engine=engine)
    if name := next((name for name, value in spec.env.items() if value == HIDDEN), ""):
        raise UsageError(
            f"env.{name} is {HIDDEN}, the placeholder for a secret in job.yaml",
            f"export {name}, and use -e {name}; or set it in your own job file",
        )
    spec = secret_files.with_contents(folders.with_absolute(_with_requirements(spec)))
    source.enter(spec)
    if why := unencodable(spec):
        raise UsageError(why, "export LC_ALL=C.UTF-8")
    return check_script(spec)


def _with_requirements(spec: JobSpec) -> JobSpec:
    """Replace the requirements file by its lines, so that the job does not depend on the file any longer."""
    if not spec.requirements:
        return spec
    lines = [*requirements.read(Path(spec.requirements)), *spec.pip]
    return dataclasses.replace(spec, requirements="", pip=lines)
