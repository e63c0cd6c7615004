"""From a job on disk to a job in the queue of Slurm: its code is copied, and its batch script submitted."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from orchestrate.console import print_message
from orchestrate.engines.base import Engine
from orchestrate.engines.slurm.batch_script import script, short_time, words
from orchestrate.errors import EngineError
from orchestrate.files.paths import WORK
from orchestrate.files.work import Copy
from orchestrate.host import records, slurm
from orchestrate.plan.plan import Plan
from orchestrate.record import slurm_job
from orchestrate.record.paths import JobPaths
from orchestrate.spec.spec import JobSpec
from orchestrate.supervise.job_files import JobFiles


def submit(engine: Engine, spec: JobSpec, plan: Plan, paths: JobPaths) -> None:
    """Submit a job whose run directory exists; raises EngineError with Slurm's own words if it refuses it."""
    _copy_code(plan, paths, engine.hidden(plan, paths.shared))
    records.write(paths.script, script(spec, paths))
    number = slurm.call(*words(spec, paths), cwd=str(paths.root)).strip().partition(";")[0]
    if not number.isdigit():
        raise EngineError(f"sbatch did not print the number of a job, but {number!a}")
    slurm_job.keep(paths, number)
    print_message(f"submitted {paths.root.name} as {slurm_job.Batch(number, paths)}")
    if why := short_time(spec):
        print_message(f"warning: {why}")


def _copy_code(plan: Plan, paths: JobPaths, hidden: Collection[str]) -> None:
    """Copy the code folder to the working directory of workers: the job may start after it has changed.

    What is there already is kept.
    """
    code, files = Path(plan.placement.code), JobFiles(paths)
    copy = Copy(code, {*hidden}, paths.folder, WORK, str(code), None)
    copy.run()
    files.keep_copied(files.copied() | copy.copied)
