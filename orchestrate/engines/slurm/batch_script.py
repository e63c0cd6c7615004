"""The batch script of a job, for sbatch."""

from __future__ import annotations

import contextlib
import math
import re
import shlex
import sys
from collections.abc import Mapping

from orchestrate.engines.slurm.engine import COMMENT, cpus, gpus
from orchestrate.files.paths import PACKAGE
from orchestrate.record import slurm_job
from orchestrate.record.paths import JobPaths
from orchestrate.spec.inputs import REQUEUES
from orchestrate.spec.sizes import UNLIMITED, parse_size
from orchestrate.spec.spec import JobSpec
from orchestrate.spec.values import LONG

EARLY = 60  # seconds that Slurm may send a signal early
NOTICE = 30  # seconds, in addition to the grace period, between SIGTERM and the end of the allocation
SCRIPT = """\
#!/bin/bash
# Supervises {job}, on the first of its machines. It was submitted with
#     {submit}
cd {package} && exec {command}
"""


def options(spec: JobSpec, paths: JobPaths) -> dict[str, str]:
    """Return the options of sbatch for a job that this batch script supervises."""
    output = str(slurm_job.early_log(paths)).replace("%", "%%")  # Slurm would replace %u, for example
    found = requested(spec, paths.root.name, spec.trainers + 1 + spec.spares, output)
    return found | {"comment": f"{COMMENT}{paths.root}", "export": "ALL", "no-kill": ""} | given(spec)


def requested(spec: JobSpec, name: str, nodes: int, output: str) -> dict[str, str]:
    """Return the options of sbatch for any job, supervised or not, before those that the job names."""
    found = {
        "job-name": name,
        "nodes": str(nodes),
        "ntasks-per-node": "1",
        "cpus-per-task": str(cpus(spec)),
        "output": output,
        "open-mode": "append",
        "signal": f"B:TERM@{math.ceil(spec.grace) + NOTICE}",
        "requeue": "",
    }
    if spec.memory and spec.memory != UNLIMITED:
        whole = spec.memory[-1].lower() in "kmg"  # Slurm has these units, but not bytes
        found["mem"] = spec.memory.upper() if whole else f"{math.ceil(parse_size(spec.memory) / 1024)}K"
    if count := gpus(spec):
        found["gpus-per-node"] = str(math.ceil(count / (spec.trainers + 1)))
    return found


def given(spec: JobSpec) -> dict[str, str]:
    """Return the options of Slurm that the job names; durations as other keys have them, such as 2h, in minutes."""
    found = {name: value for name, value in spec.slurm.items() if name != REQUEUES}
    for name in ("time", "time-min"):
        if re.search("[a-z]$", found.get(name, "")):
            with contextlib.suppress(ValueError):  # sbatch says what it accepts
                found[name] = str(max(1, math.ceil(LONG.parse(found[name]) / 60)))
    return found


def short_time(spec: JobSpec) -> str:
    """Return a warning if the time limit, as sbatch(1) reads it, leaves workers less than a minute before SIGTERM."""
    found = re.fullmatch(r"(?:(\d{1,6})-)?(\d{1,9})(?::(\d\d))?(?::(\d\d))?", given(spec).get("time", ""))
    if not found:
        return ""
    days, first, second, third = (int(part or 0) for part in found.groups())
    hours = found[1] or found[4]  # D-H:M:S and H:M:S, but M:S and M
    seconds = 86400 * days + (3600 * first + 60 * second + third if hours else 60 * first + second)
    left = seconds - math.ceil(spec.grace) - NOTICE - EARLY
    if left >= 60:
        return ""
    return f"slurm.time leaves workers {max(0, left)} s to start and train in each allocation, before SIGTERM"


def flags(options: Mapping[str, str]) -> list[str]:
    """Return options as arguments of a command of Slurm."""
    return [f"--{name}{f'={value}' * bool(value)}" for name, value in options.items()]


def words(spec: JobSpec, paths: JobPaths) -> list[str]:
    """Return the command that submits a job: as options of it, they take precedence over variables such as SBATCH_*."""
    return ["sbatch", "--parsable", *flags(options(spec, paths)), str(paths.script)]


def script(spec: JobSpec, paths: JobPaths) -> str:
    """Return the batch script of a job."""
    safe = "-P" if sys.version_info >= (3, 11) else "-s"
    command = [sys.executable, safe, "-m", "orchestrate", "attach", paths.root.name, "--batch"]
    command += ["--runs", str(paths.root.parent)]
    return SCRIPT.format(
        job=paths.root.name,
        submit=shlex.join(words(spec, paths)).replace("\n", " "),  # in a comment
        package=shlex.quote(str(PACKAGE.parent)),
        command=shlex.join(command),
    )
