"""Check for problems that keep jobs from running on a cluster with Slurm."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from orchestrate import __version__
from orchestrate.doctor.findings import BAD, GOOD, WARNING, Finding
from orchestrate.engines.slurm import image
from orchestrate.engines.slurm.batch_script import flags, given, requested, short_time
from orchestrate.engines.slurm.engine import SlurmEngine
from orchestrate.errors import EngineError, OrchestrateError
from orchestrate.files.paths import PACKAGE
from orchestrate.host import private, records, slurm
from orchestrate.plan.plan import pluralize
from orchestrate.spec.spec import IMAGE, JobSpec

PATIENCE = 20  # seconds to wait for a free machine
FREE = ("idle", "mixed")
# What a machine sees, as JSON: of each path, whether it exists; and what it can import.
PROBE = """import importlib.util, json, os, platform, sys
sys.path.insert(0, sys.argv[1])
found = {name: importlib.util.find_spec(name) is not None for name in ("torch", "orchestrate")}
json.dump([os.uname().nodename, platform.python_version(), [*map(os.path.exists, sys.argv[2:])], found], sys.stdout)
"""


def doctor(spec: JobSpec) -> Iterator[Finding]:
    """Check the commands, the partitions, and what a machine sees; prints nothing."""
    try:
        engine = SlurmEngine()
        yield Finding(GOOD, f"Slurm {engine.version}")
        controllers = slurm.call("scontrol", "ping")
    except OrchestrateError as error:
        yield Finding(BAD, str(error), error.hint, error.exit_code)
        return
    if " UP" not in controllers:
        yield Finding(BAD, f"no controller answers: {' '.join(controllers.split())}", "scontrol ping")
        return
    yield from _partitions(spec)
    kind = slurm.call("scontrol", "show", "config").partition("AccountingStorageType")[2].partition("\n")[0]
    off = "none" in kind or "(null)" in kind  # Slurm 22, and 24
    yield Finding(
        GOOD, "accounting is off: a job is known for some minutes after its end" if off else "accounting is on"
    )
    yield from _images(spec)
    yield from _request(spec)
    yield from _machine(spec)


def _request(spec: JobSpec) -> Iterator[Finding]:
    """Report whether Slurm could place a job with these options; if only one of 1 node, it is a warning."""
    nodes = spec.trainers + 1 + spec.spares
    refusal = _refusal(spec, nodes)
    fits = nodes if not refusal else 1 if not _refusal(spec, 1) else 0
    if fits:
        yield Finding(GOOD, f"Slurm can place a job of {pluralize(fits, 'node')} with these options")
    if why := short_time(spec):
        yield Finding(WARNING, why, "raise slurm.time, or lower grace")
    if refusal:
        what = f"Slurm cannot place a job of {pluralize(nodes, 'node')} with these options: {refusal}"
        hint = "use other --nodes, --memory, --cpus, --gpus or options of slurm: what a partition has is listed above"
        yield Finding(WARNING if fits else BAD, what, hint)


def _refusal(spec: JobSpec, nodes: int) -> str:
    """Ask Slurm, without a job, why no machines could run one of so many nodes; empty if some could."""
    options = requested(spec, "doctor", nodes, os.devnull) | given(spec)
    try:
        slurm.call("sbatch", "--test-only", *flags(options), "--wrap=true")
        return ""
    except OrchestrateError as error:
        return str(error)


def _images(spec: JobSpec) -> Iterator[Finding]:
    """Report what runs images; a job with one needs it."""
    try:
        yield Finding(GOOD, f"{image.form()} runs images")
    except OrchestrateError as error:
        if spec.image != IMAGE:
            yield Finding(BAD, str(error), error.hint)


def _partitions(spec: JobSpec) -> Iterator[Finding]:
    """Report partitions with their machines; one that the job names must be among them."""
    totals: dict[str, list[str]] = {}
    free: dict[str, int] = {}
    for line in slurm.call("sinfo", "--noheader", "--format", "%R|%D|%T|%c|%m|%G|%l").splitlines():
        name, count, state, *facts = line.split("|")
        free[name] = free.get(name, 0) + int(count) * (state in FREE)
        totals[name] = [str(int(totals.get(name, ["0"])[0]) + int(count)), *facts]
    for name, (count, cores, memory, gpus, limit) in totals.items():
        has = "no GPUs" if gpus == "(null)" else gpus
        each = f"{cores} cores, {memory} MB, {has}"
        time = "no time limit" if limit == "infinite" else f"time limit {limit}"
        yield Finding(GOOD, f"partition {name}: {pluralize(int(count), 'machine')}, {free[name]} free; {each}; {time}")
    wanted = spec.slurm.get("partition")
    if wanted and wanted not in totals:
        yield Finding(BAD, f"there is no partition {wanted}", f"partitions are {', '.join(totals)}")


def _machine(spec: JobSpec) -> Iterator[Finding]:
    """Ask a machine whether it sees this folder, the records of jobs, and the same Python."""
    places = [next(records.places()), PACKAGE]
    try:
        private.make(places[0])
        with tempfile.NamedTemporaryFile(dir=Path.cwd(), prefix=".orchestrate-") as file:
            words = [sys.executable, "-I", "-c", PROBE, str(PACKAGE.parent), file.name, *map(str, places)]
            text = slurm.call("srun", *flags(given(spec)), "--ntasks=1", f"--immediate={PATIENCE}", "--quiet", *words)
        host, python, (folder, home, package), found = json.loads(text.splitlines()[-1])
    except (EngineError, OSError, ValueError, IndexError) as error:
        if "execve" in str(error) and sys.executable in str(error):
            hint = "install Python, with orchestrate and torch, at the same path on all machines, or in a shared folder"
            yield Finding(BAD, f"a machine has no {sys.executable}", hint)
            return
        what = f"no machine could be asked whether it sees the same files: {error}"
        yield Finding(WARNING, what, "try again when a machine is free, and look for Python at the same path on it")
        return
    share = "use a folder that all machines share"
    yield Finding(GOOD, f"{host} has Python {python} at {sys.executable}")
    yield (
        Finding(GOOD, f"{host} sees this folder") if folder else Finding(BAD, f"{host} does not see this folder", share)
    )
    if not home:
        hint = "set XDG_STATE_HOME to a folder that all machines share"
        yield Finding(BAD, f"{host} does not see {places[0]}, with the records of jobs", hint)
    if not package or not found["orchestrate"]:
        yield Finding(
            BAD, f"{host} does not find orchestrate {__version__}", "install it at the same path on all machines"
        )
    if not found["torch"]:
        yield Finding(WARNING, f"{host} has no torch", "install it at the same path on all machines")
