"""Export a job to Slurm: a script for sbatch that starts a node on each machine and restarts all if one fails."""

from __future__ import annotations

import math
import re

from orchestrate import console
from orchestrate.engines.slurm.batch_script import flags, given, requested
from orchestrate.errors import UsageError
from orchestrate.export.batch_text import filled, unattended
from orchestrate.plan import container
from orchestrate.spec.spec import JobSpec

LINE = re.compile(r"[^\s\"'#\\]*")  # what sbatch does not split, unquote or cut off
SCRIPT = """\
{head}
{options}

set -u
{secrets}cd {folder} || exit 2
export JOB_DIR="$SLURM_SUBMIT_DIR/runs/{name}"
export NODE_FAILED="$JOB_DIR/.failed" NODE_PATIENT=1
{functions}MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR

stop=
trap 'stop=1; scancel --signal=TERM "$SLURM_JOB_ID"' TERM  # reaches the nodes; srun would kill them
for attempt in $(seq 0 {max_restarts}); do
    # Each generation has its own number and port, even if Slurm has requeued this script.
    export TORCHELASTIC_RESTART_COUNT=$((${{SLURM_RESTART_COUNT:-0}} * ({max_restarts} + 1) + attempt))
    export MASTER_PORT=$((20000 + (SLURM_JOB_ID * 97 + TORCHELASTIC_RESTART_COUNT) % 20000))
    own "$SLURM_SUBMIT_DIR/runs"
    own "$JOB_DIR"
    rm -f "$NODE_FAILED"
    env {env}"$(command -v srun)" \\
        --nodes={nodes} --ntasks={nodes} --ntasks-per-node=1 --cpus-per-task={cpus} --cpu-bind=none \\
        --kill-on-bad-exit=1 --wait={wait} \\
        {launch} &
    step=$!
    while kill -0 "$step" 2>/dev/null; do wait "$step"; done  # a signal interrupts a wait
    wait "$step"  # bash remembers the exit code of a process that has ended during the trap
    code=$?
    [ "$code" = 0 ] || code=$(first_failure || echo "$code")
    case $code in 0) exit 0 ;; {no_restart}) exit "$code" ;; esac
    [ -z "$stop" ] || exit "$code"
    echo "generation $TORCHELASTIC_RESTART_COUNT ended with exit code $code" >&2
done
exit "$code"
"""


def slurm(spec: JobSpec, name: str, form: str) -> str:
    """Return the sbatch script of a job; `form` is venv, apptainer or pyxis.

    Raises UsageError for settings that cannot be exported.
    """
    job = unattended(spec, name, "Slurm")
    options = requested(spec, name, job.nodes, f"slurm-{name}-%j.log")
    if spec.max_run:
        options["time"] = str(max(1, math.ceil(spec.max_run / 60)))
    for key, value in given(spec).items():
        if not LINE.fullmatch(value):
            hint = "remove spaces, quotes, # and backslashes, or set it on the command line of sbatch"
            raise UsageError(f"slurm.{key}: {console.quoted(value)} cannot be in a #SBATCH line", hint)
    words = flags(options | given(spec))
    return filled(
        SCRIPT,
        spec,
        job,
        form,
        "sbatch",
        job.env,
        options="\n".join(f"#SBATCH {word}" for word in words),
        cpus=options["cpus-per-task"],
        wait=container.stop_seconds(spec.grace),
    )
